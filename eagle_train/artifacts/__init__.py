"""Drafts on disk. Knows nothing of training or decoding.

- `format`: the artifact, the directory that is distributed; written atomically, read with every tensor checked
- `tensors`: a draft's tensors as a file holds them, quantised or not
- `layouts`: tensor names and config.json of vLLM, SGLang, TensorRT-LLM and speculators
- `foreign`: drafts that others trained (EAGLE-1, EAGLE-3, P-EAGLE, Medusa)
- `hub`: download and upload
- `convert`: a draft into the layout and precision of an engine; `calibrate`: its rounding with error feedback
- `verify`: what was written against what was trained
- `card`: the model card; `markdown`: its escaping and tables
"""

from eagle_train.artifacts.format import Artifact, load_draft, read_artifact, save_draft, write_artifact

__all__ = ["Artifact", "load_draft", "read_artifact", "save_draft", "write_artifact"]

"""What is wrong with a draft, by measurement. In the order in which a draft is examined:

- `options`: the settings of `eagle-doctor`; `causes`: what can be found, and what to do about it
- `reading`: the draft as an engine reads its files, and as it was trained; `files`: what the files themselves show
- `texts`: prompts, answers, and what the target computed on them; `measure`: what a draft is worth on them
- `compare`: the draft as it is served against the draft as it was trained, module by module
- `replay`: our engine against the training graph, round by round; `tracing`: where they part
- `served_by_vllm`: the same in vLLM; `vllm`: vLLM as a program, and `vllm_job`, what its interpreter runs
- `conventions`: ablations that show a wrong convention by what its change gains: of what it is fed
  (`fed_variants`), and of itself (`own_variants`)
- `overflow`: whether its numbers fit the type that it is served in
- `learning`: what the draft has learnt, and from which texts; `template`: under which chat template
- `run`: all of it; `report`: how it is told

Knows nothing of how a draft is trained.
"""

from eagle_train.diagnosis.causes import CAUSES, Finding
from eagle_train.diagnosis.options import DoctorConfig
from eagle_train.diagnosis.run import Diagnosis, examine

__all__ = ["CAUSES", "Diagnosis", "DoctorConfig", "Finding", "examine"]

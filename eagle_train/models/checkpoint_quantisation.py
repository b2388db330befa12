"""Whether a quantised checkpoint can be read here: its method, the libraries and the device that it needs. DESIGN 3.4.

Told from its config, before a weight is read. Drafts' quantisation is models/draft_quantisation.py's.
"""

import copy
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig

from eagle_train.errors import check, foreign, shown
from eagle_train.hardware import computes_fp8

# What transformers reads a method's weights with: the modules, and the packages that have them.
LIBRARIES: Mapping[str, Mapping[str, str]] = {
    "aqlm": {"aqlm": "aqlm[gpu,cpu]"},
    "auto-round": {"auto_round": "auto-round"},
    "awq": {"gptqmodel": "gptqmodel"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "eetq": {"kernels": "kernels"},
    "fbgemm_fp8": {"fbgemm_gpu": "fbgemm-gpu-genai"},
    "fouroversix": {"fouroversix": "fouroversix"},
    "fp_quant": {"fp_quant": "fp_quant"},
    "gptq": {"optimum": "optimum", "gptqmodel": "gptqmodel"},
    "higgs": {"flute": "flute-kernel", "fast_hadamard_transform": "fast_hadamard_transform"},
    "hqq": {"hqq": "hqq"},
    "quanto": {"optimum.quanto": "optimum-quanto"},
    "quark": {"quark": "amd-quark"},
    "sinq": {"sinq": "sinq"},
    "spqr": {"spqr_quant": "spqr_quant[gpu]"},
    "torchao": {"torchao": "torchao"},
    "vptq": {"vptq": "vptq"},
}
FP8 = ("fp8", "mxfp8")  # whose products are in a kernel; on other devices transformers makes numbers of them
UNREAD = ("nvfp4", "gguf")  # which transformers knows, but not in a checkpoint
OF_BITSANDBYTES = ("load_in_8bit", "load_in_4bit")  # whose configs may have no quant_method
INSTEAD = "give the checkpoint that it was made from, which is not quantised"


def quantization_config_of(config: Any) -> Any:
    """A checkpoint's quantization_config, also where it stands in its language model's config; None without one."""
    own = getattr(config, "quantization_config", None)
    return getattr(config.get_text_config(), "quantization_config", None) if own is None else own


def check_quantization_config(config: Any, place: str, device: torch.device | None) -> None:
    """Raise UserError for a checkpoint in a quantisation that cannot be read; `place` begins the message.

    `device`: where it is to run; None in a plan, which may be for other machines than this.
    """
    found = quantization_config_of(config)
    if found is None:
        return
    check(
        isinstance(found, Mapping) and ("quant_method" in found or any(found.get(key) for key in OF_BITSANDBYTES)),
        f"{place}: quantization_config={shown(found)} has no quant_method, as transformers wants it; {INSTEAD}",
    )
    with foreign(f"{place}: its quantization_config cannot be read"):
        is_known = AutoHfQuantizer.supports_quant_method(found)
    method = found.get("quant_method") or "bitsandbytes"
    check(is_known and method not in UNREAD, f"{place}: transformers cannot read quant_method={method}; {INSTEAD}")
    needed = dict(LIBRARIES.get(method, {}))
    if method in FP8 and device is not None and computes_fp8(device):
        needed |= {"kernels": "kernels"}
    missing = [package for module, package in needed.items() if not is_installed(module)]
    check(
        not missing,
        f"{place}: quant_method={method} needs {' and '.join(missing)}: `pip install {' '.join(missing)}`, or "
        f"{INSTEAD}",
    )
    with foreign(f"{place}: its quantization_config (quant_method={method}) cannot be read"):
        known = AutoQuantizationConfig.from_dict(copy.deepcopy(found))
    if device is not None:
        with foreign(f"{place}: quant_method={method} cannot be read on {device}, {INSTEAD}"):
            AutoHfQuantizer.from_config(known).validate_environment(device_map={"": str(device)}, weights_only=True)


def is_installed(module: str) -> bool:
    """Whether a module is there, without importing it, but for the packages that it is in."""
    return all(find_spec(name) for name in accumulate(module.split("."), "{}.{}".format))

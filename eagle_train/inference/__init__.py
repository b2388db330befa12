"""The inference harness: the paper's pipeline from prefill to bookkeeping. Knows nothing of training.

The names below are what users may call. Everything else in these folders is internal and may change.
"""

from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.logprobs import TokenLogprobs
from eagle_train.inference.decode.row_trees import DynamicTree, OpenTree, PlanTree, RowTrees, dynamic
from eagle_train.inference.decode.simulated import SimulatedAcceptance
from eagle_train.inference.decode.tree import Tree, chain, full, pruned
from eagle_train.inference.drafters.draft_model import DraftModel
from eagle_train.inference.drafters.drafter import (
    Choice,
    Drafted,
    Drafter,
    DraftRound,
    Needs,
    Outcome,
    Pending,
    RowText,
    TreePlan,
)
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.drafters.layer_skip import LayerSkip
from eagle_train.inference.drafters.text_drafter import TextDrafter, TextTree
from eagle_train.inference.engine import Engine
from eagle_train.inference.options import EngineConfig
from eagle_train.inference.parallel.disaggregated import RemotePrefill
from eagle_train.inference.parallel.lines import connect
from eagle_train.inference.parallel.prefill_server import PrefillServer
from eagle_train.inference.requests.requests import Requests
from eagle_train.inference.requests.sampling_params import SamplingParams
from eagle_train.inference.requests.sequence import Output, Sequence, Stats, Update

__all__ = [
    "Choice",
    "Dispatcher",
    "DraftModel",
    "DraftRound",
    "Drafted",
    "Drafter",
    "DynamicTree",
    "Eagle",
    "Engine",
    "EngineConfig",
    "LayerSkip",
    "Needs",
    "OpenTree",
    "Outcome",
    "Output",
    "Pending",
    "PlanTree",
    "PrefillServer",
    "RemotePrefill",
    "Requests",
    "RowText",
    "RowTrees",
    "SamplingParams",
    "Sequence",
    "SimulatedAcceptance",
    "Stats",
    "TextDrafter",
    "TextTree",
    "TokenLogprobs",
    "Tree",
    "TreePlan",
    "Update",
    "chain",
    "connect",
    "dynamic",
    "full",
    "pruned",
]

"""The tests' own order: each module has its test file, no test imports another, what they share is in tests/support."""

import re
from pathlib import Path

import pytest

from tests.support.slow import slow_tests

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "eagle_train"
# Also in a program that a test holds as a string of several lines.
IMPORTED_TEST = re.compile(r"^ *(?:from|import) +(?:\S*\btest_|tests\S* +import +.*\btest_).*$", re.MULTILINE)
# Modules without a test file at their own place, ROOM/test_MODULE.py, by the file that tests them.
TESTED_IN = {
    "corpus/test_conversations.py": "corpus/columns",
    "corpus/test_json_files.py": "corpus/rows",
    "corpus/test_stream.py": "corpus/feed",
    "corpus/test_preview.py": "models/stops",
    "corpus/test_templates.py": "corpus/answer_starts corpus/content_checks corpus/reasoning corpus/render "
    "corpus/template corpus/tokens corpus/turns",
    "diagnosis/test_vllm.py": "diagnosis/served_by_vllm diagnosis/vllm_job",
    "diagnosis/test_run.py": "diagnosis/compare diagnosis/conventions diagnosis/fed_variants diagnosis/files "
    "diagnosis/overflow diagnosis/own_variants diagnosis/replay diagnosis/tracing",
    "inference/cache/test_paged_kv.py": "inference/cache/prefix inference/cache/suffix",
    "inference/lookup/test_datastore.py": "inference/lookup/datastore_format",
    "inference/parallel/test_disaggregated.py": "inference/parallel/lines inference/parallel/prefill_server",
    "inference/parallel/test_vocabulary.py": "inference/parallel/cost inference/parallel/divided_draft",
    "inference/cache/test_prefix_cache.py": "inference/cache/block_ends",
    "inference/drafters/test_checks.py": "inference/drafters/text_drafter",
    "inference/drafters/test_lookup.py": "inference/drafters/ngram inference/drafters/suffix",
    "inference/drafters/test_draft_model.py": "inference/drafters/same_tokenizer",
    "inference/drafters/test_layer_skip.py": "models/stages",
    "inference/drafters/test_all_at_once.py": "inference/drafters/trained",
    "inference/drafters/test_drafters.py": "inference/decode/row_trees inference/drafters/proposed",
    "inference/decode/test_tree.py": "inference/decode/named_trees tree_names",
    "inference/decode/test_adaptive.py": "inference/decode/acceptance inference/decode/calibration "
    "inference/decode/round_costs",
    "inference/decode/test_graphs.py": "inference/decode/recording inference/decode/rounds ops/graphs",
    "inference/decode/test_sampling.py": "inference/decode/validation inference/decode/verification ops/cumulative",
    "inference/grammar/test_promises.py": "inference/grammar/expressions inference/grammar/formats "
    "inference/grammar/json_schema inference/grammar/json_text inference/grammar/numbers inference/grammar/patterns "
    "inference/grammar/rules",
    "inference/requests/test_bad_requests.py": "inference/requests/requests inference/requests/sampling_params",
    "inference/requests/test_detokenizer.py": "inference/requests/marked_text",
    "inference/requests/test_scheduler.py": "inference/cache/block_memory inference/cache/block_pool "
    "inference/requests/admission",
    "inference/test_compiled.py": "inference/compiling ops/compiled",
    "inference/test_continuous.py": "inference/decode/prefill inference/requests/prefiller",
    "inference/test_engine.py": "inference/batch inference/decode/bookkeeping inference/decode/dispatcher "
    "inference/decode/stage_times inference/drafters/eagle inference/drafters/growing inference/options "
    "inference/parts inference/runner",
    "inference/test_overlap.py": "ops/transfer",
    "inference/test_simulated.py": "inference/decode/simulated",
    "ops/test_fused_loss.py": "ops/fused_loss_kernel",
    "ops/test_attention.py": "ops/rule ops/visible_slots",
    "ops/test_few_rows.py": "ops/device_time ops/few_rows_kernel",
    "ops/test_head_argmax.py": "ops/head_argmax_kernel",
    "ops/test_paged.py": "ops/paged_kernel",
    "models/test_directory.py": "models/config_json",
    "artifacts/test_eagle3_layouts.py": "artifacts/foreign_eagle3 drafts/eagle3_layouts",
    "artifacts/test_peagle_layouts.py": "drafts/peagle_layouts",
    "artifacts/test_medusa_layouts.py": "artifacts/foreign_medusa drafts/medusa_layouts",
    "drafts/test_eagle3.py": "drafts/own_head drafts/steps",
    "drafts/test_eagle.py": "drafts/head drafts/kind models/layers",
    "models/test_family.py": "models/probe models/twin",
    "models/test_patches.py": "ops/joint_linear",
    "models/test_stored.py": "models/checkpoint_quantisation",
    "models/test_target.py": "models/experts models/forward models/loading models/shapes models/weights",
    "test_cache.py": "caching/build caching/options caching/size caching/verify caching/walk caching/writer "
    "models/cached_target models/state_files",
    "test_cli.py": "errors misread settings",
    "test_commands.py": "generate train",
    "test_datastore.py": "retrieval/build retrieval/documents retrieval/options retrieval/size",
    "test_doctor.py": "diagnosis/causes diagnosis/options diagnosis/report",
    "test_export.py": "artifacts/card artifacts/convert artifacts/foreign artifacts/hub artifacts/layouts "
    "drafts/eagle_layouts drafts/layouts "
    "artifacts/tensors artifacts/verify training/trained_draft",
    "test_private_api.py": "hydra_private ops/torch_private transformers_private",
    "test_regenerate.py": "regeneration/by_engine regeneration/by_server regeneration/dialogue regeneration/options "
    "regeneration/outcome regeneration/row_log regeneration/run",
    "test_terminal.py": "usage",
    "training/test_checkpoint.py": "training/checkpoint/format training/checkpoint/store training/checkpoint/verify",
    "training/test_cost.py": "training/cost/estimate training/cost/flops training/cost/memory training/cost/offline "
    "training/cost/report "
    "training/cost/target_shape training/cost/this_machine",
    "training/test_step_profile.py": "training/cost/measured",
    "training/test_init_from.py": "artifacts/of_target training/assembly",
    "training/test_metrics.py": "results",
    "training/test_optimizer.py": "training/muon",
    "training/test_trainer.py": "training/backend training/evaluate training/resume "
    "training/runaway training/state training/train_config",
}


def modules() -> set[str]:
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    return {path.as_posix() for path in paths}


def own_test(module: str) -> str:
    room, _, name = f"/{module}".rpartition("/")
    return f"{room}/test_{name}.py".lstrip("/")


def test_every_module_has_its_tests():
    """In the file at its own place, or in the one that the table names; and the table names nothing else."""
    elsewhere = {module for named in TESTED_IN.values() for module in named.split()}
    without = {module for module in modules() if not (TESTS / own_test(module)).exists()}
    advice = "add a test file at its own place (tests/ROOM/test_MODULE.py), or a word in TESTED_IN"
    assert not without - elsewhere, f"{sorted(without - elsewhere)}: {advice}"
    assert not elsewhere - without, f"{sorted(elsewhere - without)}: take it out of TESTED_IN"
    assert [file for file in TESTED_IN if not (TESTS / file).exists()] == []


def test_no_test_imports_another():
    found = {path.relative_to(TESTS): IMPORTED_TEST.findall(path.read_text("utf-8")) for path in TESTS.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from tests.corpus.test_x import chat",
        "def f():\n    import tests.corpus.test_x",
        "from tests.corpus import test_x",
        "import test_x",
        "PROGRAM = '''\nimport os\nfrom tests.corpus.test_x import chat\n'''",
    ],
)
def test_an_imported_test_is_found(text):
    assert len(IMPORTED_TEST.findall(text)) == 1


def test_slow_tests_are_there():
    for name in slow_tests():
        file, _, test = name.partition("::")
        assert f"def {test}(" in (TESTS / file).read_text("utf-8"), f"tests/support/slow.txt: {name}"

"""What the figures of a draft say about it, in sentences. Knows nothing of how they were measured.

`found` is what evals/mt_bench.py writes to results.json.
"""

from evals.bench.report import Found, loops, percent

# Limits beyond which a figure gets a sentence. They are rules of thumb, not measurements.
LOW_DEPTH_1 = 0.7
SERVING_GAP = 0.02
POLICY_GAP = 0.05
FEATURE_DROP = 0.05
DRAFTING_SHARE = 0.5
REPEATED = 0.1


def diagnosis(found: Found) -> list[str]:
    """The findings. Of an EAGLE draft the first two are always there: the train/serve check, and how often draft and
    target agree. Of other drafters there may be none."""
    own = [] if found["train_serve_check"] is None else _draft_findings(found)
    return own + _cost_findings(found) + _answer_findings(found)


def _draft_findings(found: Found) -> list[str]:
    """What an EAGLE draft has learnt."""
    check, shares, findings = found["train_serve_check"], found["acceptance_per_depth"], []
    served, trained = check["depth_1_served"], check["depth_1_as_trained"]
    own, reference = check["agreement_on_own_answers"], check["agreement_on_reference_answers"]
    if trained is None:
        findings.append(
            "Train/serve check: left out, as rounds differ in their trees, or drafts are drawn; try batch_size=1, or "
            "one static tree for all, without engine.gate, and engine.drafting=greedy."
        )
    else:
        agree = abs(served - trained) <= SERVING_GAP
        said = "Both ways agree." if agree else "They disagree: look for positions, norms or hidden states that differ."
        findings.append(
            f"Train/serve check: the target took the first drafted token in {percent(served)} of the rounds; run over "
            f"the same tokens as in training, the draft proposes it in {percent(trained)}. {said}"
        )
    policy = f"Draft and target choose the same next token at {percent(own)} of the tokens of the target's own answers"
    if reference is None:
        findings.append(f"{policy}.")
    else:
        findings.append(f"{policy}, and at {percent(reference)} of those of the file's answers.")
    if reference is not None and reference - own > POLICY_GAP:
        findings.append("The draft knows the file's text better than the target's: train it on the target's answers.")
    if shares and shares[0] < LOW_DEPTH_1:
        tokens = found["draft_training"].get("tokens")
        seen = f"; its artifact says it was trained on {tokens:,} tokens" if tokens else ""
        findings.append(
            f"Depth 1 is drafted from the target's own hidden states, so {percent(shares[0])} is what the draft itself "
            f"has learnt{seen}. Train it longer, on conversations like these under the same chat template."
        )
    second = (found["acceptance_after_depth_before"] or [])[1:2]
    if second and second[0] is not None and shares[0] - second[0] > FEATURE_DROP:
        findings.append(
            f"From depth 2 on the draft reads its own hidden states, and acceptance falls from {percent(shares[0])} to "
            f"{percent(second[0])}: its features drift. Train it on its own features too."
        )
    return findings


def _cost_findings(found: Found) -> list[str]:
    """Why the speed-up is less than tokens per call."""
    stages = found["stage_ms_per_round"]
    share = stages.get("drafting", 0.0) / sum(stages.values())
    findings = []
    if found["speedup"] < 1:
        findings.append("Speculation makes this target slower here: a round costs more than the tokens it saves.")
    if share > DRAFTING_SHARE:
        findings.append(f"Drafting is {percent(share)} of a round: a shorter chain or fewer layers may be faster.")
    return findings


def _answer_findings(found: Found) -> list[str]:
    """What makes the figures doubtful."""
    findings = []
    if found["repeated_8grams"] > REPEATED and not loops(found):  # which a warning tells
        findings.append("The target repeats itself, so this TPC says little about text that does not.")
    if found["differing_answers"]:
        cause = "which fp32 should not bring about" if found["dtype"] == "float32" else f"rounding in {found['dtype']}"
        findings.append(f"{found['differing_answers']} answers differ from plain decoding's: {cause}.")
    if found["finish_reasons"].get("context"):
        findings.append(f"{found['finish_reasons']['context']} answers were cut short by the target's context.")
    if found["finish_reasons"].get("overflow"):
        findings.append(f"{found['finish_reasons']['overflow']} answers ended because the target computed NaN.")
    return findings

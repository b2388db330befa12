"""The drafter of a draft that was trained: its kind says which. DESIGN section 3.5."""

from eagle_train.drafts import Draft
from eagle_train.inference.drafters.all_at_once import AllAtOnce
from eagle_train.inference.drafters.chained import Chained
from eagle_train.inference.drafters.eagle import Eagle, check_alignment
from eagle_train.inference.drafters.one_pass import OnePass
from eagle_train.models.target import Target


def drafter_of(draft: Draft, target: Target, alignment: str = "accepted") -> Eagle:
    """What proposes with a draft of any kind. `alignment`: see `Eagle`. Raises UserError."""
    made: type[Eagle] = AllAtOnce if draft.config.at_once else OnePass if draft.config.in_one_pass else Eagle
    if draft.config.whole_passes > 1:  # of other kinds one pass has all parameters
        made = Chained
    return made(draft, target, alignment)


def make_eagle(target: Target, draft: Draft | None, alignment: str = "accepted") -> Eagle | None:
    """The drafter of conf/drafter/eagle.yaml; None, which is plain decoding, without a draft."""
    check_alignment(alignment)
    return None if draft is None else drafter_of(draft, target, alignment)

"""Evaluations: a published number each. They may import everything; nothing imports them."""

import os

# OpenMP's threads spin while they wait. On cores shared with anything else that makes every step about 8 times slower
# (DESIGN section 5). The runtime reads this once, when torch loads it, so it must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

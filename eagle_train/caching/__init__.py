"""A target's hidden states on disk, computed once for many runs: what `eagle-cache` does.

- `options`: the settings of a cache, beside those of the run that it is for
- `walk`: that run's rows, and which documents are first met in each
- `size`: what a cache will take, before anything is computed
- `writer`: the shards of one rank
- `build`: a cache from start to end; an interrupted one is resumed
- `verify`: a cache read again, and some of its documents computed again

How states lie on disk and are read is `eagle_train/models/state_files.py` and `cached_target.py`.
"""

from eagle_train.caching.build import build_cache
from eagle_train.caching.options import CacheConfig
from eagle_train.caching.verify import verify_cache

__all__ = ["CacheConfig", "build_cache", "verify_cache"]

"""The last module that the process imports from which ranks are forked: what is there by now, no rank's collector looks
through again. DeepSpeed calls it for each draft that it divides."""

import gc

gc.collect()
gc.freeze()

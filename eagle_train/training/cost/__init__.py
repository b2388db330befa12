"""The cost of a training run before it starts: what `plan=true` prints. Loads no weights.

target_shape.py counts a target, flops.py and memory.py have the formulas, estimate.py puts them together,
this_machine.py measures the machine at hand, report.py prints. measured.py has the plan beside a profiled run.
"""

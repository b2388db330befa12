"""Kernels: each fast path with a plain torch twin. Knows nothing of models, caches or requests.

Internal: nothing here is for users of the package.
"""

"""The paged KV cache: allocation, block tables, prefix caching, offload to the host. Knows nothing of sampling."""

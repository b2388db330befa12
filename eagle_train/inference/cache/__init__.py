"""The KV cache in blocks: allocation, block tables, prefix reuse, offload to the host. Knows nothing of sampling."""

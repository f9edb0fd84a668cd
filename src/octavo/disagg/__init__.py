"""Prefill and decode on different servers: KV pages move, books close on both sides. See docs/disaggregation.md."""

"""Scripts that run a peer in its own environment. They import nothing of Octavo: the peer's Python runs them."""

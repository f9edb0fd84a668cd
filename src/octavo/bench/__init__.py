"""`octavo bench`: this engine's speed, a peer's on the same work in the same run, perplexity of weight formats."""

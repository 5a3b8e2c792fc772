"""exittrain: train draft models for speculative decoding on the trees they will really draw, and prove the gain."""

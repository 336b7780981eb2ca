"""Small language models trained by reinforcement learning, to merge and to measure merges with."""

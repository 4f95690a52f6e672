"""Reinforcement learning: samples of the model that is trained, rewards for them, and losses of their log-probabilities."""

"""Reinforcement learning: samples from the model in training, rewards for them, and losses of their log-probabilities."""

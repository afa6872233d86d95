"""Polar: reinforcement learning over agent harnesses as they are."""

__version__ = "0.1.0"

"""seedrl: a centralized inference engine and its learners for reinforcement learning."""

__version__ = "0.1.0"

"""fulltilt: reinforcement learning and supervised fine-tuning of language models that sets its own performance knobs.

Importing the package imports neither torch nor transformers: reward processes and `fulltilt --help` start from here.
"""

__version__ = "0.1.0"

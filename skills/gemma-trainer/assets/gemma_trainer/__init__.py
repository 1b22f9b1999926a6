"""What the gemma-trainer scripts share. Modules form a ladder: each imports only from those below it."""

__version__ = "0.1.0"

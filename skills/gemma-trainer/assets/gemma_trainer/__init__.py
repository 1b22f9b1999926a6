"""What the gemma-trainer scripts share. Modules form a ladder: each imports only from those below it."""

from . import auto_class

__version__ = "0.1.0"
auto_class.teach()

"""Define the errors of a sandbox."""


class OptionError(ValueError):
    """An option is out of range, or this machine cannot isolate programs as it asks; the message begins with it."""


class LostError(RuntimeError):
    """The process that starts programs died or hung."""

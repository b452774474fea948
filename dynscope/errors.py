"""The two exceptions of dynscope: anything of ours, and what a user can mend."""


class DynscopeError(Exception):
    """Something inside dynscope went wrong."""


class InputError(DynscopeError):
    """Bad input that a user can mend: one clear line naming file, place, reason and remedy.

    ``exit_code`` is what the command line ends with: 1 for a bad input, 2 for wrong usage.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code

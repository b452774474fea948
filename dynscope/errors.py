"""The two exceptions of dynscope, anything of ours and what a user can mend; and others in one line."""


class DynscopeError(Exception):
    """Something inside dynscope went wrong."""


def first_line(error: BaseException, most: int = 160) -> str:
    """The first line of what an error says, or its class where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0][:most]


class InputError(DynscopeError):
    """Bad input that a user can mend: one clear line naming file, place, reason and remedy.

    ``exit_code`` is what the command line ends with: 1 for a bad input, 2 for wrong usage.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code

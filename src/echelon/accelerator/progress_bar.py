"""A tqdm progress bar on one process per machine."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm as _tqdm

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.world.world import World


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a tqdm bar that is visible only on local rank zero.

    Args:
        args: passed to tqdm.
        main_process_only: show the bar only on local rank zero. False: every process shows its own bar.
        kwargs: passed to tqdm; ``disable=True`` hides the bar everywhere.

    Raises:
        UsageError: the first argument is a bool, as in an older signature of this function.
    """
    if args and isinstance(args[0], bool):
        raise UsageError(
            _("tqdm({first}, ...): the first argument must be an iterable", first=args[0]),
            do=_("pass main_process_only={first}", first=args[0]),
        )
    hidden = kwargs.pop("disable", False)
    if main_process_only and not hidden:
        hidden = not World.current().is_local_rank_zero
    bar: Any = _tqdm
    return bar(*args, disable=hidden, **kwargs)

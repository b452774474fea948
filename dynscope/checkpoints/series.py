"""Several checkpoints of one training, in the order of their steps."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dynscope.checkpoints.checkpoint import Checkpoint
from dynscope.checkpoints.distributed import METADATA
from dynscope.checkpoints.opening import INDEXES, NAMED, PART, is_tensor_file, opened, weight_files
from dynscope.checkpoints.place import Place
from dynscope.errors import InputError

_WORD = r"(?:global[_-]?step|step|steps|iter|iteration|checkpoint|ckpt|update|epoch)"
_NUMBER = re.compile(
    rf"(?:^|[^a-z])({_WORD})[=_-]?(\d+)((?:e\d|[km])(?=$|[^a-z\d]))?(?=$|[^\d])", re.IGNORECASE
)
_BARE = re.compile(r"^(\d+)(?=$|\.\D)|(?<=[_-])(\d{3,})(?=$|\.\D)")  # not llama-3

_LAST_STEP = 2**63 - 1
_UNITS = {"": 1, "k": 1000, "m": 1_000_000}  # else it is e3 and the like


def series(paths: Sequence[str], allow: Sequence[str] = ()) -> list[Checkpoint]:
    """The checkpoints at these files, folders and URLs, ordered by step where all have one.

    A folder is one checkpoint (Hugging Face's, torch.distributed's, one file of tensors), or holds
    the checkpoints of a series: ``step1000/ step2000/``, ``model-step=100.ckpt``. The step is that of
    the name, else what the checkpoint itself says. ``allow`` names classes that a pickle may have.

    One of several that cannot be read is left out, and named in ``unreadable`` of the first.

    Raises `InputError` where there is none, none can be read, or two have the same step.
    """
    places = [place for path in paths for place in _expanded(Place(path))]
    found, failed = [], []
    for place in dict.fromkeys(places):
        try:
            names = _names(place)
            one = _with_step(place, opened(place, names, tuple(allow)))
            found.append(replace(one, unreadable=(*one.unreadable, *_others(place, names or []))))
        except InputError as error:
            failed.append((place.name, str(error), error))
    if not found:
        raise failed[0][2]
    lost = tuple((name, reason) for name, reason, _ in failed)
    found[0] = replace(found[0], unreadable=(*found[0].unreadable, *lost))
    steps = [one.step for one in found]
    if None in steps:
        return found
    by_step: dict[int | None, Checkpoint] = {}
    for one in found:
        if one.step in by_step:
            raise InputError(
                f"{by_step[one.step].path} and {one.path}: are both of step {one.step}; give one of them"
            )
        by_step[one.step] = one
    return sorted(found, key=lambda one: one.step or 0)


def step_of(name: str) -> int | None:
    """The step that the name of a file or folder tells: the last number after a word for it."""
    told = _NUMBER.findall(name)
    if told:
        steps = [one for one in told if one[0].lower() != "epoch"]  # step=1000-epoch=3
        _, number, unit = (steps or told)[-1]
        factor = _UNITS.get(unit.lower()) or 10 ** int(unit[1:])
        return int(number) * factor
    bare = None if PART.match(name) else _BARE.search(name)
    return int(bare.group(1) or bare.group(2)) if bare else None


def _with_step(place: Place, one: Checkpoint) -> Checkpoint:
    """The step of its own name, else what it says itself, else that of the folder of a file."""
    told = step_of(place.name)
    if told is None and one.step is None and _is_file(place):
        told = step_of(place.parent.name)
    step = one.step if told is None else told
    return replace(one, step=step if step is None or step <= _LAST_STEP else None)


def _names(place: Place) -> list[str] | None:
    """What lies in a folder, None for a file."""
    return None if _is_file(place) else _listed(place)


def _is_file(place: Place) -> bool:
    return is_tensor_file(place.name) if place.is_on_web else place.is_file()


def _others(place: Place, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Checkpoints that lie in the folder of another, as a trainer leaves them."""
    for name in names:
        if step_of(name) is not None and place.child(name).is_folder():
            yield name, f"another checkpoint in the folder of this one: give {name} as a path too"


def _listed(place: Place) -> list[str]:
    """What lies in a folder; a web server that lists nothing is asked for the usual names."""
    if not place.is_on_web:
        return place.names()
    known = (*INDEXES, *NAMED, METADATA, "config.json", "trainer_state.json")
    return [name for name in known if place.child(name).is_file()]


def _expanded(place: Place) -> Iterator[Place]:
    """The place itself where it is one checkpoint, else those in it that have steps."""
    if _is_file(place):
        yield place
        return
    if not place.is_on_web and not place.is_folder():
        raise InputError(f"{place}: no such file or folder")
    names = _listed(place)
    if METADATA in names or any(index in names for index in INDEXES) or weight_files(names):
        yield place
        return
    parts = [name for name in names if re.fullmatch(r"consolidated\.\d\d\.pth", name)]
    if len(parts) > 1:
        raise InputError(
            f"{place}: holds a model cut into {len(parts)} tensor-parallel parts ({parts[0]} and so "
            "on), each with a slice of every tensor: convert it to safetensors first"
        )
    inside = [name for name in names if step_of(name) is not None]
    members = [place.child(name) for name in inside if is_tensor_file(name)]
    members += [child for name in inside if (child := place.child(name)).is_folder()]
    if not members:
        place.check_answer()
        raise InputError(
            f"{place}: holds no checkpoint: expected .safetensors, .bin, .pt, .ckpt or .gguf files, "
            "a torch.distributed checkpoint, or a series such as step100/ step200/"
        )
    yield from members

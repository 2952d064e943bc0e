"""A chain of defenses as a Flower mod, on any Flower client: what the server gets has gone through it."""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from numpy.typing import NDArray
from torch import Tensor

from recleak.defenses.base import Defense, hooks
from recleak.defenses.base import check as check_defense
from recleak.deploy.flower_records import Parts, check_parts, numpy_of, only_arrays, tensors_of, told_here, update_of
from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.components import Component
from recleak.streams import Streams
from recleak.training.visit import after_epoch

_HOOKS = {"sharing", "epoch", "upload"}  # where a mod can act: it sees what comes in and what goes out
_STATE = "recleak mod"  # what the chain keeps on the device, in Flower's state


def as_mod(defense: Defense, parts: Parts) -> Mod:
    """The defense on what leaves a Flower client: `ClientApp(mods=[as_mod(...)])`, before all other mods of the list.

    `parts` maps each name of the client's array record to a component, which says its role and whether it has a row per
    item; the defense speaks of the names of components. A name that is mapped to None never leaves: the server gets
    what it sent. One that is not mapped is an error, and nothing is sent.

    The update (what is sent minus what was received) goes through the hooks `epoch`, once, and `upload`, with draws
    from the operating system. A component that the defense keeps stays on the device, and the client finds its own
    there in the next round. Numbers of 16 or 64 bits are treated in 32.

    Metrics pass as they are. Only replies to train messages carry arrays; others that do are refused. Of an error, also
    one of the client, the server is told the type; what it says is in the device's log.
    """
    components = defense.sharing(check_parts(parts))
    _check(defense, components)
    shared = {part.name for part in components if part.shared}

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        with told_here():
            return answer(message, context, call_next)

    def answer(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            reply = call_next(message, context)
            if not reply.has_error() and reply.content.array_records:
                raise ConfigError(
                    f"Got arrays in the reply to a message {message.metadata.message_type!r}, expected none: nothing "
                    "protects them.\n  Send arrays as the reply to train messages only."
                )
            return reply
        sent = only_arrays(message.content, "the message of the server")
        before = tensors_of(sent, parts, "the message of the server")
        kept = {name: part.name for name, part in parts.items() if part is not None and part.name not in shared}
        reply = call_next(_with_own(message, context, kept), context)
        if reply.has_error():
            return reply
        replied = only_arrays(reply.content, "the reply")
        after = tensors_of(replied, parts, "the reply")
        own = {name: replied[name] for name in kept}
        if own:
            context.state[_STATE] = ArrayRecord(own)
        protected = _protected(defense, components, before, after)
        arrays = {}
        for name, part in parts.items():
            if part is None or part.name not in shared:
                arrays[name] = sent[name]
            else:
                arrays[name] = Array(_as_sent(protected[part.name], numpy_of(name, replied[name])))
        key = next(iter(reply.content.array_records))
        reply.content[key] = ArrayRecord(arrays)
        return reply

    return mod


def _check(defense: Defense, components: tuple[Component, ...]) -> None:
    check_defense(defense, components)
    if beyond := sorted(hooks(defense) - _HOOKS):
        raise ConfigError(
            f"{defense!r} acts on {', '.join(beyond)}, which a mod does not see: it gets what a client receives and "
            f"sends. Expected only {', '.join(sorted(_HOOKS))}.\n"
            "  Train with recleak.deploy.flower.client_app, which runs every hook."
        )
    if defense.secure_aggregation or defense.own_components():
        raise ConfigError(
            f"{defense!r} needs other clients or parameters of its own, got a mod on a single client.\n"
            "  A cohort behind one SuperNode sends sums with recleak.deploy.flower.client_app."
        )


def _with_own(message: Message, context: Context, kept: dict[str, str]) -> Message:
    """The message with what the device kept in the place of what the server sent."""
    if not kept or _STATE not in context.state.array_records:
        return message
    own = context.state.array_records[_STATE]
    content = RecordDict(dict(message.content.items()))
    for key, record in message.content.array_records.items():
        content[key] = ArrayRecord({name: own.get(name, array) for name, array in record.items()})
    message.content = content  # the record is of this message; the server's may be the same for all
    return message


def _protected(defense: Defense, components: tuple[Component, ...], before: Params, after: Params) -> Params:
    """What leaves: what was received, and the change as the defense makes it."""
    leaving = tuple(part for part in components if part.shared)
    update = update_of(before, after, leaving)
    streams = Streams.from_os()
    if "epoch" in hooks(defense):
        update = update.with_all_rows() if defense.every_row and update.rows else update
        update = after_epoch(defense, update, streams.at(1))
    if "upload" in hooks(defense):
        update = defense.upload(update, streams.within("upload"))
    moved = {name: value[0] for name, value in update.values.items()}
    result = {name: before[name] + value for name, value in moved.items()}
    for name, rows in update.rows.items():
        result[name] = before[name].index_add(0, update.item, rows)
    return result


def _as_sent(value: Tensor, like: NDArray[Any]) -> NDArray[Any]:
    """In the type that the client sends."""
    return value.numpy().astype(like.dtype)

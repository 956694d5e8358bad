"""From `batching.lengths` and a model's description to a `LengthPlan`. Every way in which the two do not fit is one sentence.

What can be told from the settings alone is in `config/check_lengths.py` and asked here first, for settings that came another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from shoal.config.check_lengths import MASK_MISSING, length_faults
from shoal.config.settings import LengthSettings
from shoal.datatypes import DATATYPES, ModelSpec, TensorSpec
from shoal.errors import ConfigError
from shoal.tensors.lengths import InputRule, LengthGroup, LengthPlan, Role

__all__ = ["compile_lengths"]

_COUNTS: Final = ("INT32", "INT64", "UINT32", "UINT64")
_ALIKE: Final = ("policy", "edges", "ratio", "max_length", "mask", "length", "offsets")
"""What entries that vary together must agree on, as far as they say it."""


def compile_lengths(model: ModelSpec, settings: Mapping[str, LengthSettings]) -> LengthPlan | None:
    """The plan, or None where lengths change nothing. Raises `ConfigError` naming the setting, what is wrong and what to change."""
    if not settings:
        return None
    for where, message in length_faults(settings):
        raise _error(where, message)
    if not model.batchable:
        reason = model.unbatchable_reason or "it has no batch dimension"
        raise ConfigError(f"batching.lengths: the model's requests run one at a time ({reason}), so there is nothing to pad")
    return _Compiling(model, settings).plan()


def _error(where: str, message: str) -> ConfigError:
    return ConfigError(f"batching.lengths.{where}: {message}")


@dataclass(slots=True)
class _Together:
    """Entries that vary together, and what is known of them all."""

    names: list[str]
    symbols: set[str] = field(default_factory=set)
    settings: dict[str, Any] = field(default_factory=dict)


class _Compiling:
    """One model and its entries on their way to a plan."""

    def __init__(self, model: ModelSpec, settings: Mapping[str, LengthSettings]) -> None:
        self.model = model
        self.settings = settings
        self.places = {tensor.name: place for place, tensor in enumerate(model.inputs)}
        self.rules = [InputRule() for _ in model.inputs]

    def plan(self) -> LengthPlan | None:
        """All of it, in the order in which one rests on the other."""
        for name, entry in self.settings.items():
            self._check_axis(name, entry)
        together = self._together()
        for number, group in enumerate(together):
            self._agree(group)
            for name in group.names:
                self._rule_of_entry(name, number)
        for number, group in enumerate(together):
            self._rule_of_tellers(group, number)
        for number, group in enumerate(together):
            self._rules_of_others(group, number)
        if all(group.settings["policy"] == "exact" and "max_length" not in group.settings for group in together):
            return None
        groups = [self._group(group) for group in together]
        crops = [self._crops(output, together) for output in self.model.outputs]
        return LengthPlan(self.model, self._seen(crops, groups), self.rules, groups, crops)

    # ---------------------------------------------------------------- entries

    def _input(self, where: str, name: str) -> TensorSpec:
        if name not in self.places:
            known = ", ".join(f'"{known}"' for known in self.places)
            raise _error(where, f'the model has no input "{name}"; it takes {known}')
        return self.model.inputs[self.places[name]]

    def _check_axis(self, name: str, entry: LengthSettings) -> None:
        tensor = self._input(name, name)
        axis = _own_axis(entry)
        if axis >= len(tensor.shape):
            raise _error(
                f"{name}.axis", f"is {axis}, but the input has {len(tensor.shape)} dimensions {list(tensor.shape)}, from 0"
            )
        if tensor.shape[axis] != -1:
            raise _error(f"{name}.axis", f"is {axis}, where the model takes exactly {tensor.shape[axis]}: nothing varies there")
        symbol = _symbol(tensor, axis)
        if symbol and tensor.symbols.count(symbol) > 1 and entry.policy != "exact":
            raise _error(f"{name}.axis", f'the model names another axis "{symbol}" too, but only one can be padded')

    def _together(self) -> list[_Together]:
        """Entries by what ties them: one mask, one length input, one name of their axes."""
        groups: list[tuple[set[tuple[str, str]], _Together]] = []
        for name, entry in self.settings.items():
            symbol = _symbol(self._input(name, name), _own_axis(entry))
            ties = {("input", name)}
            for kind, value in (("mask", entry.mask), ("length", entry.length), ("offsets", entry.offsets), ("symbol", symbol)):
                if value:
                    ties.add((kind, value))
            merged = _Together([name], {symbol} - {""})
            for other in [item for item in groups if item[0] & ties]:
                groups.remove(other)
                ties |= other[0]
                merged = _Together(other[1].names + merged.names, other[1].symbols | merged.symbols)
            groups.append((ties, merged))
        return [group for _, group in groups]

    def _agree(self, group: _Together) -> None:
        for key in _ALIKE:
            said = {name: getattr(self.settings[name], key) for name in group.names if getattr(self.settings[name], key)}
            for name, value in said.items():
                first = next(iter(said))
                if value != said[first]:
                    text = f"is {_shown(value)}, but {first}, with which it varies, has {_shown(said[first])}; give both the same"
                    raise _error(f"{name}.{key}", text)
                group.settings[key] = value
        policy = group.settings["policy"]
        if policy in ("pad", "bucket") and not group.settings.keys() & {"mask", "length"}:
            raise _error(f"{group.names[0]}.mask", MASK_MISSING)
        if policy == "ragged" and not group.settings.keys() & {"offsets", "length"}:
            raise _error(f"{group.names[0]}.offsets", "is missing; name the input that says where each row begins")

    def _set_rule(self, where: str, place: int, rule: InputRule) -> None:
        if self.rules[place] != InputRule():
            role = self.rules[place].role.value
            raise _error(where, f'"{self.model.inputs[place].name}" has a part in lengths already ({role}); give it one only')
        self.rules[place] = rule

    def _rule_of_entry(self, name: str, group: int) -> None:
        entry, place = self.settings[name], self.places[name]
        if entry.policy == "exact":
            rule = InputRule(Role.PLAIN, group, entry.axis)
        elif entry.policy == "ragged":
            rule = InputRule(Role.RAGGED, group, 1)
        else:
            fill = _element(entry.pad_value or 0.0, self.model.inputs[place].datatype)
            if fill is None:
                text = f"is {entry.pad_value:g}, which {self.model.inputs[place].datatype} cannot hold"
                raise _error(f"{name}.pad_value", text)
            rule = InputRule(Role.PADDED, group, entry.axis, fill)
        self._set_rule(name, place, rule)

    # ---------------------------------------------------------------- inputs that tell, and inputs that vary along

    def _rule_of_tellers(self, group: _Together, number: int) -> None:
        for key, role in (("mask", Role.MASK), ("length", Role.LENGTH), ("offsets", Role.OFFSETS)):
            name = group.settings.get(key)
            if name is None:
                continue
            where = next(f"{entry}.{key}" for entry in group.names if getattr(self.settings[entry], key) == name)
            tensor = self._input(where, name)
            shape, variable = tensor.shape, tensor.shape[1:2] == (-1,)
            if role is Role.MASK and (len(shape) != 2 or not variable or tensor.datatype == "BYTES"):
                what = f"{tensor.datatype} {list(shape)}; a mask has a number for each place of each row, [-1, -1]"
                raise _error(where, f'"{name}" is {what}')
            fits = shape in ((-1,), (-1, 1)) if role is Role.LENGTH else len(shape) == 1
            if role is not Role.MASK and not (fits and tensor.datatype in _COUNTS):
                what = (
                    f"{tensor.datatype} {list(shape)}; it must be one of {', '.join(_COUNTS)}, with one number for each row, [-1]"
                )
                raise _error(where, f'"{name}" is {what}')
            self._set_rule(where, self.places[name], InputRule(role, number, 1 if role is Role.MASK else 0))

    def _rules_of_others(self, group: _Together, number: int) -> None:
        """Inputs without an entry whose axes have the name of this group's: they vary along."""
        policy = group.settings["policy"]
        for place, tensor in enumerate(self.model.inputs):
            if policy == "exact" or not group.symbols or self.rules[place] != InputRule():
                continue
            axes = [axis for axis, symbol in enumerate(tensor.symbols) if symbol in group.symbols]
            if not axes:
                continue
            if policy == "ragged":
                if axes == [0]:
                    self.rules[place] = InputRule(Role.RAGGED, number, 1)
            elif len(axes) > 1:
                raise _error(
                    group.names[0], f'input "{tensor.name}" varies along with it on {len(axes)} axes, but only one can be padded'
                )
            else:
                self.rules[place] = InputRule(Role.PADDED, number, axes[0], _element(0.0, tensor.datatype) or b"")

    def _group(self, group: _Together) -> LengthGroup:
        name = group.names[0]
        axis = 1 if group.settings["policy"] == "ragged" else self.settings[name].axis
        return LengthGroup(
            group.settings["policy"],
            name,
            self.places[name],
            axis,
            group.settings.get("edges", ()),
            group.settings.get("ratio"),
            group.settings.get("max_length"),
        )

    # ---------------------------------------------------------------- outputs

    def _crops(self, output: TensorSpec, together: list[_Together]) -> tuple[tuple[int, int], ...]:
        """Axes (the client's) of an output that are as long as the rows of a group."""
        crops: dict[int, int] = {}
        said = False
        names = {tensor.name for tensor in self.model.outputs}
        for number, group in enumerate(together):
            policy = group.settings["policy"]
            for name in group.names:
                for wanted, axes in self.settings[name].outputs.items():
                    where = f"{name}.outputs.{wanted}"
                    if wanted not in names:
                        raise _error(where, f"the model has no such output; it has {', '.join(sorted(names))}")
                    if wanted == output.name:
                        said = True
                        for axis in axes:
                            self._check_crop(where, output, axis, policy)
                            if crops.setdefault(axis, number) != number:
                                raise _error(where, f"axis {axis} is said to be as long as another input's rows too")
        if said:
            return tuple(crops.items())
        for number, group in enumerate(together):
            for axis, symbol in enumerate(output.symbols):
                policy = group.settings["policy"]
                if symbol in group.symbols and policy != "exact" and (axis == 0) == (policy == "ragged"):
                    crops[axis or 1] = number
        for name, entry in self.settings.items():
            for axis, size in enumerate(output.shape):
                if axis and size == -1 and not _symbol(output, axis) and entry.policy in ("pad", "bucket"):
                    text = f'axis {axis} of output "{output.name}" varies and has no name; say whether it is as long as this input'
                    raise _error(
                        f"{name}.outputs", f"{text}, with {{ {output.name} = [{axis}] }}, or not, with {{ {output.name} = [] }}"
                    )
        return tuple(crops.items())

    @staticmethod
    def _check_crop(where: str, output: TensorSpec, axis: int, policy: str) -> None:
        if policy == "ragged":
            return
        if axis >= len(output.shape):
            raise _error(
                where, f"names axis {axis}, but the output has {len(output.shape)} dimensions {list(output.shape)}, from 0"
            )
        if output.shape[axis] != -1:
            raise _error(where, f"names axis {axis}, which is always {output.shape[axis]} long and never cut")

    # ---------------------------------------------------------------- what clients see

    def _seen(self, crops: list[tuple[tuple[int, int], ...]], groups: list[LengthGroup]) -> ModelSpec:
        ragged = {number for number, group in enumerate(groups) if group.policy == "ragged"}
        inputs: list[TensorSpec] = []
        for tensor, rule in zip(self.model.inputs, self.rules, strict=True):
            if rule.role is Role.RAGGED:
                inputs.append(_with_rows(tensor))
            elif rule.role in (Role.MASK, Role.LENGTH) and rule.group not in ragged:
                inputs.append(replace(tensor, optional=True))
            elif rule.role is Role.PLAIN or rule.role is Role.PADDED:
                inputs.append(tensor)
        outputs = [
            _with_rows(tensor) if any(group in ragged for _, group in axes) else tensor
            for tensor, axes in zip(self.model.outputs, crops, strict=True)
        ]
        return replace(self.model, inputs=tuple(inputs), outputs=tuple(outputs), steady=False)


def _own_axis(entry: LengthSettings) -> int:
    """Where the model's own input has the axis: ragged ones have no batch dimension in front."""
    return 0 if entry.policy == "ragged" else entry.axis


def _symbol(tensor: TensorSpec, axis: int) -> str:
    return tensor.symbols[axis] if tensor.symbols else ""


def _with_rows(tensor: TensorSpec) -> TensorSpec:
    """A tensor of rows laid end to end as clients know it: with the batch in front of the length."""
    return TensorSpec(tensor.name, tensor.datatype, (-1, *tensor.shape), ("", *tensor.symbols) if tensor.symbols else ())


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else f'"{value}"' if isinstance(value, str) else str(value)


def _element(value: float, datatype: str) -> bytes | None:
    """One element of padding; None where the datatype cannot hold it exactly (as near as a float gets). Empty for BYTES and 0."""
    dtype = DATATYPES[datatype].numpy
    if dtype.hasobject:
        return b"" if value == 0 else None
    if datatype == "BF16":
        bits = np.array(value, np.float32).view(np.uint32)
        return None if int(bits) & 0xFFFF else np.uint16(int(bits) >> 16).tobytes()
    with np.errstate(over="ignore", invalid="ignore"):
        element = np.array(value).astype(dtype)
    if dtype.kind == "f":
        return element.tobytes() if np.isfinite(element) else None
    inside = dtype.kind == "b" or np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    return element.tobytes() if inside and float(element) == value else None

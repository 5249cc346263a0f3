"""An extension of griffe, which reads the source for the API reference: shows members that a call creates as what they are.

``save_state = delegate(Checkpoints.save_state, "checkpoints")`` becomes a method with the signature and the docstring of its target, and
``device: torch.device = view("session.world.device", "The device.")`` or ``seed: int = setting(42, "The seed.")`` gets its text.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe

# Function -> position of the text among the arguments, and whether the first argument is the default value.
TEXTS = {"view": (1, False), "setting": (1, True), "extra": (1, True)}


class Members(griffe.Extension):
    """Rewrites the members of every class when a package is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite the members of all classes in ``pkg``."""
        for _ in range(2):  # a class may copy a text that the first pass finds
            self._rewrite(pkg, pkg)

    def _rewrite(self, parent: Any, package: griffe.Module) -> None:
        for member in list(parent.members.values()):
            if member.is_alias:
                continue
            if member.is_class or member.is_module:
                self._rewrite(member, package)
            elif (
                member.is_attribute
                and parent.is_class
                and isinstance(member.value, (griffe.ExprAttribute, griffe.ExprName))
            ):
                _copy(member, str(member.value), package)
            elif member.is_attribute and isinstance(member.value, griffe.ExprCall):
                called = str(member.value.function)
                if called == "delegate":
                    _copy(member, str(member.value.arguments[0]), package)
                elif called == "staticmethod":
                    _copy(member, str(member.value.arguments[0]), package, is_static=True)
                elif called == "property":
                    texts = [argument for argument in member.value.arguments if getattr(argument, "name", "") == "doc"]
                    if texts:
                        member.docstring = griffe.Docstring(ast.literal_eval(str(texts[0].value)), parent=member)
                    member.value = None
                elif called in TEXTS:
                    _describe(member, *TEXTS[called])
                elif called == "field" and member.docstring is None:
                    _describe_field(member)
                elif called == "given_handler":
                    member.docstring = griffe.Docstring(
                        f"The `{member.value.arguments[0]}` in `kwargs_handlers`, if there is one.", parent=member
                    )
                    member.value = None
                elif called == "axis_rank":
                    member.docstring = griffe.Docstring("The rank on this axis of `parallelism_config`.", parent=member)
                    member.value = None


def _copy(member: griffe.Attribute, source: str, package: griffe.Module, *, is_static: bool = False) -> None:
    """Replace ``member`` with the function that ``source`` names in its module, or take the text of that attribute."""
    name, *below = source.split(".")
    try:
        # Not from the class, which may call its method like the function that it takes from the module.
        target: Any = package.modules_collection[member.module.resolve(name)]
        target = target.final_target if target.is_alias else target
        for part in below:
            target = target[part]
    except (KeyError, griffe.NameResolutionError, griffe.AliasResolutionError):
        return  # of another package
    if target.is_attribute and member.docstring is None and target.docstring is not None:
        member.docstring, member.value = target.docstring, None
    if not target.is_function or member.annotation is not None:  # the second: a value that happens to be a function
        return
    parameters = list(target.parameters)
    if not is_static and not parameters:
        return  # a value: no object could call it as its method
    if not is_static:
        parameters[0] = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    made = griffe.Function(
        member.name, parameters=griffe.Parameters(*parameters), returns=target.returns, lineno=member.lineno,
        endlineno=member.endlineno, docstring=target.docstring, parent=member.parent,
    )  # fmt: skip
    made.labels |= target.labels | ({"staticmethod"} if is_static else set())
    assert member.parent is not None
    member.parent.set_member(member.name, made)


def _describe(member: griffe.Attribute, place: int, has_default: bool) -> None:
    arguments = [argument for argument in member.value.arguments if not isinstance(argument, griffe.ExprKeyword)]
    text = ast.literal_eval(str(arguments[place])) if len(arguments) > place else ""
    member.docstring = griffe.Docstring(text, parent=member)
    member.value = arguments[0] if has_default else None


def _describe_field(member: griffe.Attribute) -> None:
    for argument in member.value.arguments:
        if isinstance(argument, griffe.ExprKeyword) and argument.name == "metadata":
            member.docstring = griffe.Docstring(
                str(ast.literal_eval(str(argument.value)).get("help", "")), parent=member
            )
            member.value = None

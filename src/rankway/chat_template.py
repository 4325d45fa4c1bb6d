"""Chat templates, rendered as transformers' `apply_chat_template` does: same sandbox, globals, filters and whitespace rules.

The token count of a conversation is right only if this text is the engine's, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplate:
    """A compiled template.

    Args:
        source: the Jinja text.
        special_tokens: `bos_token`, `eos_token` … as the template's variables.

    Raises:
        ValueError: the source is no valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> str:
        """The prompt's text, generation prompt included. `template_kwargs` are variables beyond the standard ones.

        Raises:
            ValueError: the template refuses the conversation (roles out of order …) or fails on it.
        """
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
            **template_kwargs,
            "messages": messages,
        }
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from None
        except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"chat template fails on this conversation: {type(error).__name__}") from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks assistant text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    # Local time, as in transformers: the model's template asks for today's date.
    return datetime.now().strftime(format)

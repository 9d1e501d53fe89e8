"""Messages to token ids, append-only.

A conversation is one growing list of ids: what was sampled is appended exactly as sampled, and then only the ids of
the text that the chat template puts between turns. History is never tokenised again. Where a model's renderer (from
the `renderers` package) knows how to bridge turns, it does; for other models the text between turns is found by
rendering a short conversation with a marker in the assistant's place. Where a template rewrites what came before (moves
the tools, drops reasoning from earlier turns), a new context begins instead, and the row says so.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmcollect.types import Message

_MARKER = "\u2983assistant\u2984"  # no template contains or trims it
_REASONING = "\u2983reasoning\u2984"
_THINK_END = "</think>"
_MARKS = re.compile(r"</?think")

Tools = Sequence[Mapping[str, Any]] | None


class ChatRenderer:
    """Renders for one tokenizer. Stateless but for caches; a `Conversation` holds the ids.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        from renderers import create_renderer

        self._tokenizer = tokenizer
        self._renderer = create_renderer(tokenizer)
        self._end_ids = frozenset(self._renderer.get_stop_token_ids())
        self._is_plain = self._find_out_whether_only_marks_need_parsing()
        self._mark_ids = frozenset(i for token, i in tokenizer.get_added_vocab().items() if _MARKS.search(token))
        self._drops_reasoning = self._find_out_whether_reasoning_is_dropped()

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids with which the model ends its turn."""
        return sorted(self._end_ids)

    def begin(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Ids of a whole conversation up to where the assistant begins: what `apply_chat_template` gives."""
        return list(
            self._renderer.render_ids(_dicts(messages), tools=_dicts_or_none(tools), add_generation_prompt=True)
        )

    def extend(
        self, prompt_ids: list[int], response_ids: Sequence[int], messages: Sequence[Message], tools: Tools = None
    ) -> list[int] | None:
        """Ids to append after a response so that the next one can be sampled; None if the template rewrites history.

        Args:
            prompt_ids: All that the policy saw.
            response_ids: What it sampled; an end-of-turn token at its end is not repeated.
            messages: What the env answered.
        """
        response = list(response_ids)
        bridged = self._renderer.bridge_to_next_turn(
            prompt_ids, response, _dicts(messages), tools=_dicts_or_none(tools)
        )
        if bridged is not None:
            seen = prompt_ids + response
            ids = list(bridged.token_ids)
            return ids[len(seen) :] if ids[: len(seen)] == seen else None
        if self._drops_reasoning and _THINK_END in self._tokenizer.decode(response):
            return None
        between = self._between(messages, tools)
        if between is None:
            return None
        ids = list(self._tokenizer.encode(between, add_special_tokens=False))
        ended = bool(response) and response[-1] in self._end_ids
        return ids[1:] if ended and ids and ids[0] == response[-1] else ids

    def parse(self, response_ids: Sequence[int], prompt_ids: list[int], tools: Tools = None) -> tuple[str, Message]:
        """The response as text without special tokens, and as an assistant message."""
        text = self._tokenizer.decode(list(response_ids), skip_special_tokens=True)
        if self._is_plain and not _MARKS.search(text) and self._mark_ids.isdisjoint(response_ids):
            return text, {"role": "assistant", "content": text}
        parsed = self._renderer.parse_response(list(response_ids), tools=_dicts_or_none(tools), prompt_ids=prompt_ids)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = parsed.reasoning_content
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.tool_calls
            if call.name is not None
        ]
        if calls:
            message["tool_calls"] = calls
        return text, message

    def _between(self, messages: Sequence[Message], tools: Tools) -> str | None:
        """The template's text from the end of an assistant's content to where the next one begins."""
        asked = [{"role": "user", "content": "?"}]
        answered = [*asked, {"role": "assistant", "content": _MARKER}]
        before = self._text(asked, tools)
        after = self._text([*answered, *_dicts(messages)], tools)
        if not after.startswith(before + _MARKER):
            return None
        return after[len(before) + len(_MARKER) :]

    def _find_out_whether_only_marks_need_parsing(self) -> bool:
        """Whether a response without marks of reasoning is its text and nothing else.

        So it is with the default renderer, unless the template itself opens the reasoning; it takes a millisecond to
        say so, most of it for another look at the prompt.
        """
        from renderers.default import DefaultRenderer

        prompt = self._text([{"role": "user", "content": "?"}], None)
        return type(self._renderer) is DefaultRenderer and not _MARKS.search(prompt)

    def _find_out_whether_reasoning_is_dropped(self) -> bool:
        """Whether the template shows an earlier answer without the reasoning that it began with."""
        answer = f"<think>\n{_REASONING}\n{_THINK_END}\n\n{_MARKER}"
        conversation = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "?"},
        ]
        return _REASONING not in self._text(conversation, None)

    def _text(self, messages: list[dict[str, Any]], tools: Tools) -> str:
        rendered = self._tokenizer.apply_chat_template(
            messages, tools=_dicts_or_none(tools), tokenize=False, add_generation_prompt=True
        )
        return str(rendered)


class Conversation:
    """The ids of one trajectory: the one list that grows.

    Attributes:
        context_ids: All ids that the next response is sampled after, once `prompt` was called.
    """

    def __init__(self, renderer: ChatRenderer, tools: Tools = None) -> None:
        self.context_ids: list[int] = []
        self._renderer, self._tools = renderer, tools
        self._messages: list[Message] = []
        self._response_ids: Sequence[int] | None = None

    def prompt(self, messages: Sequence[Message], new_context: bool = False) -> tuple[list[int], bool]:
        """Append an observation: its new ids, and whether they begin a new context.

        Args:
            messages: What the env said.
            new_context: Whether the messages replace all that came before.
        """
        if self._response_ids is not None and not new_context:
            extension = self._renderer.extend(self.context_ids, self._response_ids, messages, self._tools)
            if extension is not None:
                self._messages += messages
                self.context_ids += [*self._response_ids, *extension]
                return extension, False
        self._messages = [*messages] if new_context else [*self._messages, *messages]
        new = self._renderer.begin(self._messages, self._tools)
        self.context_ids = list(new)
        return new, self._response_ids is not None

    def respond(self, response_ids: Sequence[int]) -> tuple[str, Message]:
        """Append a response: its text, and the message parsed from it."""
        self._response_ids = response_ids
        text, message = self._renderer.parse(response_ids, self.context_ids, self._tools)
        self._messages.append(message)
        return text, message


def _dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]


def _dicts_or_none(tools: Tools) -> list[dict[str, Any]] | None:
    return None if tools is None else [dict(tool) for tool in tools]

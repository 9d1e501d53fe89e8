"""Ids grow by what was sampled and by the template's text between turns, and by nothing else."""

from typing import Any

from llmcollect.rendering import ChatRenderer, Conversation
from tests import tiny_model

USER, TOOL = {"role": "user", "content": "hi"}, {"role": "tool", "content": "42"}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_the_first_turn_is_the_chat_template() -> None:
    tokenizer = tiny_model.make_tokenizer()
    messages = [{"role": "system", "content": "be brief"}, USER]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Conversation(ChatRenderer(tokenizer)).prompt(messages) == (list(expected), False)


def test_later_turns_append_the_template_text_between_them() -> None:
    tokenizer = tiny_model.make_tokenizer()
    conversation = Conversation(ChatRenderer(tokenizer))
    conversation.prompt([USER])
    end = tokenizer.eos_token_id
    sampled = [*ids_of(tokenizer, "yes"), end]
    assert conversation.respond(sampled)[0] == "yes"
    new, reset = conversation.prompt([{"role": "user", "content": "why?"}])
    assert not reset
    assert new == ids_of(tokenizer, "\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n")
    whole = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    assert conversation.context_ids == ids_of(tokenizer, whole) + new


def test_a_response_cut_by_length_gets_its_end_as_prompt() -> None:
    tokenizer = tiny_model.make_tokenizer()
    conversation = Conversation(ChatRenderer(tokenizer))
    conversation.prompt([USER])
    conversation.respond(ids_of(tokenizer, "ye"))
    new, _ = conversation.prompt([TOOL])
    assert new == ids_of(tokenizer, "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n")


def test_sampled_ids_are_never_tokenised_again() -> None:
    """Bytes that are no UTF-8: decoding and encoding them would give other ids."""
    tokenizer = tiny_model.make_tokenizer()
    conversation = Conversation(ChatRenderer(tokenizer))
    first, _ = conversation.prompt([USER])
    broken = [ids_of(tokenizer, "é")[0]] * 3 + [300, 7]
    conversation.respond(broken)
    conversation.prompt([USER])
    assert conversation.context_ids[len(first) : len(first) + len(broken)] == broken


def test_a_template_that_rewrites_history_begins_a_new_context() -> None:
    tokenizer = tiny_model.make_tokenizer()
    # Only the last message keeps its text: what was prompted before is not a prefix of what comes later.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{{ m['content'] if loop.last else '...' }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    conversation = Conversation(ChatRenderer(tokenizer))
    conversation.prompt([USER])
    conversation.respond(ids_of(tokenizer, "yes<|im_end|>"))
    new, reset = conversation.prompt([{"role": "user", "content": "why?"}])
    assert reset
    text = "".join(f"<|im_start|>{role}\n...<|im_end|>\n" for role in ("user", "assistant"))
    assert new == ids_of(tokenizer, f"{text}<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n")
    assert conversation.context_ids == new


def test_a_template_that_drops_reasoning_begins_a_new_context_after_an_answer_that_has_some() -> None:
    tokenizer = tiny_model.make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{{ m['content'].split('</think>')[-1].lstrip('\n') }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    renderer = ChatRenderer(tokenizer)
    plain, thinking = Conversation(renderer), Conversation(renderer)
    for conversation, answer in ((plain, "yes"), (thinking, "<think>\nhm\n</think>\n\nyes")):
        conversation.prompt([USER])
        conversation.respond(ids_of(tokenizer, f"{answer}<|im_end|>"))
    assert plain.prompt([USER]) == (
        ids_of(tokenizer, "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        False,
    )
    new, reset = thinking.prompt([USER])
    assert reset
    turns = [("user", "hi"), ("assistant", "yes"), ("user", "hi")]
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    assert new == ids_of(tokenizer, text + "<|im_start|>assistant\n")


def test_a_template_that_keeps_reasoning_goes_on() -> None:
    tokenizer = tiny_model.make_tokenizer()
    conversation = Conversation(ChatRenderer(tokenizer))
    conversation.prompt([USER])
    conversation.respond(ids_of(tokenizer, "<think>hm</think>yes<|im_end|>"))
    assert not conversation.prompt([USER])[1]


def test_an_env_may_replace_the_context() -> None:
    tokenizer = tiny_model.make_tokenizer()
    conversation = Conversation(ChatRenderer(tokenizer))
    conversation.prompt([USER])
    conversation.respond(ids_of(tokenizer, "yes<|im_end|>"))
    new, reset = conversation.prompt([{"role": "user", "content": "anew"}], new_context=True)
    assert reset
    assert new == ids_of(tokenizer, "<|im_start|>user\nanew<|im_end|>\n<|im_start|>assistant\n")
    conversation.respond(ids_of(tokenizer, "ok<|im_end|>"))
    later, reset = conversation.prompt([USER])
    assert not reset
    assert conversation.context_ids == new + ids_of(tokenizer, "ok<|im_end|>") + later


def test_smollm2_adds_its_system_message_once() -> None:
    """The template that SmolLM2 ships: a default system message goes in front, and never between turns."""
    tokenizer = tiny_model.make_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    conversation = Conversation(ChatRenderer(tokenizer))
    conversation.prompt([USER])
    conversation.respond(ids_of(tokenizer, "yes<|im_end|>"))
    new, _ = conversation.prompt([USER])
    assert new == ids_of(tokenizer, "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")

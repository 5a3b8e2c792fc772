"""A byte-level tokenizer trained on a few sentences, with the chat templates of well-known families."""

from __future__ import annotations

import pytest

CHATML = (  # SmolLM2's own: a default system turn, BOS equal to <|im_start|>
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (  # Llama 3's shape: BOS, a system turn with the date, EOT unlike EOS, trimmed contents
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ '<|start|>system<|end|>\n\nToday: ' + date_string + '\n\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{{ '<|eot|>' }}{% for m in messages %}"
    "{{ '<|start|>' + m['role'] + '<|end|>\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
GEMMA = (  # raises on a system turn and on roles that do not alternate
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<|start|>' + ('model' if m['role'] == 'assistant' else m['role']) }}"
    "{{ '\n' + m['content'] | trim + '<|eot|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
)
THINKING = (  # Qwen3's shape: earlier thoughts are dropped from history, enable_thinking decides the generation prompt
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m['content'] %}{% if m['role'] == 'assistant' %}{% set thought = '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}{% set content = '<think>\n' + thought + '\n</think>\n\n' + content %}{% endif %}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "thinking": THINKING}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|start|>", "<|end|>", "<|eot|>"]
SENTENCES = [
    "You are a helpful assistant. What is the time? It is three o'clock.",
    "system user assistant model Today",
] * 3


def build_tokenizer(template: str):
    """Vocabulary 300: 256 bytes, 7 control tokens, some merges. BOS and EOS as the family has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    bos = "<|im_start|>" if template in ("chatml", "thinking") else "<|bos|>"
    eos = "<|im_end|>" if template in ("chatml", "thinking") else "<|endoftext|>"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    fast.chat_template = TEMPLATES[template]
    return fast


def stop_ids(tokenizer, template: str) -> list[int]:
    """Stop tokens of the family: the generation config's list, EOT included."""
    names = ["<|im_end|>"] if template in ("chatml", "thinking") else ["<|endoftext|>", "<|eot|>"]
    return tokenizer.convert_tokens_to_ids(names)


@pytest.fixture(scope="session")
def tokenizers():
    return {name: build_tokenizer(name) for name in TEMPLATES}


@pytest.fixture
def renderer(tokenizers):
    """renderer("chatml", **policy) -> ChatRenderer."""
    from exittrain.stages.conversations.chat import ChatRenderer

    return lambda name="chatml", **policy: ChatRenderer(tokenizers[name], stop_ids(tokenizers[name], name), **policy)

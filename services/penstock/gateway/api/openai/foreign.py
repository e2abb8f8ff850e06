"""Fields of other servers with OpenAI's API. Their clients send them, and they would change the answer: what says what
an answer must be is honoured; the rest is refused by name, unless its value asks for nothing else than what every
answer here is."""

from typing import Annotated

import msgspec
from msgspec import Raw

from penstock.gateway.api.fields import ABSENT, accepted, honoured, refused

_TOKENS = "send max_tokens"
_PENALTY = "send repetition_penalty"
THINKING = "the model decides by itself whether it thinks"


class VllmFields(msgspec.Struct, kw_only=True):
    """vLLM's."""

    guided_json: Annotated[Raw, honoured("a schema, or the text of one")] = ABSENT
    guided_regex: Annotated[str | None, honoured("a regular expression")] = None
    guided_choice: Annotated[Raw, honoured("a list of texts")] = ABSENT
    guided_grammar: Annotated[str | None, honoured("Lark or GBNF")] = None
    guided_decoding_backend: Annotated[Raw, accepted("how a constraint is kept does not change what it allows")] = (
        ABSENT
    )
    guided_whitespace_pattern: Annotated[Raw, refused()] = ABSENT
    structured_outputs: Annotated[Raw, honoured("json, regex, choice, grammar or json_object")] = ABSENT
    allowed_token_ids: Annotated[list[int] | None, honoured("no other token is generated")] = None
    bad_words: Annotated[
        list[str] | None,
        honoured("none is in an answer as a word of its own, unless a grammar leaves nothing else; see apis.md"),
    ] = None
    include_stop_str_in_output: Annotated[bool | None, honoured("the answer shows the stop string")] = None
    length_penalty: Annotated[Raw, refused("", 1)] = ABSENT
    use_beam_search: Annotated[Raw, refused("", False)] = ABSENT
    prompt_logprobs: Annotated[Raw, refused()] = ABSENT
    logits_processors: Annotated[Raw, refused("", [])] = ABSENT
    skip_special_tokens: Annotated[Raw, refused("", True)] = ABSENT
    spaces_between_special_tokens: Annotated[Raw, accepted("special tokens are never shown")] = ABSENT
    truncate_prompt_tokens: Annotated[
        int | None, honoured("only the last tokens of the prompt are read; -1: as many as leave room for the answer")
    ] = None
    add_special_tokens: Annotated[Raw, refused("the tokenizer and the template decide")] = ABSENT
    return_tokens_as_token_ids: Annotated[Raw, refused("send return_token_ids", False)] = ABSENT
    priority: Annotated[int | None, honoured("another name of penstock.priority")] = None
    cache_salt: Annotated[Raw, refused("tenants never share a cache")] = ABSENT
    request_id: Annotated[Raw, refused("send the header x-request-id")] = ABSENT
    kv_transfer_params: Annotated[Raw, refused()] = ABSENT
    vllm_xargs: Annotated[Raw, refused("", {})] = ABSENT
    repetition_detection: Annotated[Raw, refused()] = ABSENT


class LlamaCppFields(VllmFields, kw_only=True):
    """Those of llama.cpp's server too."""

    grammar: Annotated[str | None, honoured("GBNF or Lark")] = None
    grammar_lazy: Annotated[Raw, refused("", False)] = ABSENT
    json_schema: Annotated[Raw, honoured("a schema, or the text of one")] = ABSENT
    n_predict: Annotated[Raw, refused(_TOKENS, -1)] = ABSENT
    repeat_penalty: Annotated[Raw, refused(_PENALTY, 1)] = ABSENT
    repeat_last_n: Annotated[Raw, refused("repetition_penalty looks at the whole text", -1)] = ABSENT
    typical_p: Annotated[Raw, refused("", 1)] = ABSENT
    tfs_z: Annotated[Raw, refused("", 1)] = ABSENT
    top_a: Annotated[Raw, refused("", 0)] = ABSENT
    mirostat: Annotated[Raw, refused("", 0)] = ABSENT
    mirostat_tau: Annotated[Raw, accepted("says how mirostat works, which is refused")] = ABSENT
    mirostat_eta: Annotated[Raw, accepted("says how mirostat works, which is refused")] = ABSENT
    dynatemp_range: Annotated[Raw, refused("", 0)] = ABSENT
    dynatemp_exponent: Annotated[Raw, accepted("says how dynatemp_range works, which is refused")] = ABSENT
    dry_multiplier: Annotated[Raw, refused("", 0)] = ABSENT
    dry_base: Annotated[Raw, accepted("says how dry_multiplier works, which is refused")] = ABSENT
    dry_allowed_length: Annotated[Raw, accepted("says how dry_multiplier works, which is refused")] = ABSENT
    dry_penalty_last_n: Annotated[Raw, accepted("says how dry_multiplier works, which is refused")] = ABSENT
    dry_sequence_breakers: Annotated[Raw, accepted("says how dry_multiplier works, which is refused")] = ABSENT
    xtc_probability: Annotated[Raw, refused("", 0)] = ABSENT
    xtc_threshold: Annotated[Raw, accepted("says how xtc_probability works, which is refused")] = ABSENT
    samplers: Annotated[Raw, refused()] = ABSENT
    min_keep: Annotated[Raw, refused("", 0, 1)] = ABSENT
    n_keep: Annotated[Raw, accepted("the context is never shifted")] = ABSENT
    n_probs: Annotated[Raw, refused("send logprobs and top_logprobs", 0)] = ABSENT
    n_indent: Annotated[Raw, refused("", 0)] = ABSENT
    cache_prompt: Annotated[Raw, accepted("the cache never changes an answer")] = ABSENT
    id_slot: Annotated[Raw, accepted("where a request runs never changes its answer")] = ABSENT
    t_max_predict_ms: Annotated[Raw, refused("", 0)] = ABSENT
    timings_per_token: Annotated[Raw, refused("", False)] = ABSENT
    return_progress: Annotated[Raw, refused("", False)] = ABSENT
    lora: Annotated[Raw, refused("", [])] = ABSENT
    reasoning_format: Annotated[Raw, refused("", "auto", "deepseek")] = ABSENT


class ForeignFields(LlamaCppFields, kw_only=True):
    """Those of Ollama, SGLang, OpenRouter and of models' makers too."""

    format: Annotated[Raw, honoured('"json" or a schema')] = ABSENT
    options: Annotated[Raw, refused("send its entries as fields", {})] = ABSENT
    keep_alive: Annotated[Raw, accepted("the model stays loaded")] = ABSENT
    think: Annotated[Raw, refused(THINKING)] = ABSENT
    thinking: Annotated[Raw, refused(THINKING)] = ABSENT
    thinking_budget: Annotated[Raw, refused(THINKING)] = ABSENT
    thinking_token_budget: Annotated[Raw, refused(THINKING)] = ABSENT
    include_reasoning: Annotated[Raw, refused("", True)] = ABSENT
    separate_reasoning: Annotated[Raw, refused("", True)] = ABSENT
    stream_reasoning: Annotated[Raw, refused("", True)] = ABSENT
    regex: Annotated[str | None, honoured("a regular expression")] = None
    ebnf: Annotated[str | None, honoured("GBNF or Lark")] = None
    structural_tag: Annotated[Raw, refused()] = ABSENT
    min_new_tokens: Annotated[Raw, refused("send min_tokens", 0)] = ABSENT
    max_new_tokens: Annotated[Raw, refused(_TOKENS)] = ABSENT
    max_output_tokens: Annotated[Raw, refused(_TOKENS)] = ABSENT
    stop_regex: Annotated[Raw, refused("", [])] = ABSENT
    no_stop_trim: Annotated[bool | None, honoured("another name of include_stop_str_in_output")] = None
    lora_path: Annotated[Raw, refused()] = ABSENT
    custom_logit_processor: Annotated[Raw, refused()] = ABSENT
    custom_params: Annotated[Raw, refused("", {})] = ABSENT
    return_hidden_states: Annotated[Raw, refused("", False)] = ABSENT
    random_seed: Annotated[Raw, refused("send seed")] = ABSENT
    safe_prompt: Annotated[Raw, refused("", False)] = ABSENT
    provider: Annotated[Raw, refused("", {})] = ABSENT
    models: Annotated[Raw, refused("send model", [])] = ABSENT
    transforms: Annotated[Raw, refused("", [])] = ABSENT
    plugins: Annotated[Raw, refused("", [])] = ABSENT
    usage: Annotated[Raw, accepted("every answer has its usage; a stream by stream_options")] = ABSENT

"""Our sandbox renders what transformers' does, and gives away no more."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from penstock.chat.messages import Message, Rendering
from penstock.chat.model import _template_text, load_chat_model
from penstock.chat.sandbox import generated_arguments
from penstock.chat.template import ChatTemplate
from penstock.errors import InvalidRequest
from penstock.models import embedded

from .tiny import TEMPLATE

MODEL = load_chat_model(embedded("penstock-mini"))
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You are Q.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ("user", "system") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
ODDS = """\
{% set ns = namespace(found=false, n=0) %}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% set ns.n = ns.n + 1 %}
    {% generation %}{{ message.content | trim | upper }}{% endgeneration %}
{% endfor %}
{{ ns.n }} {{ {'b': 'é<', 'a': [1, none]} | tojson(indent=2) }} {{ dict(a=1)['a'] }} {{ messages | length }}
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <now> & é",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
ARGUMENTS = '{"city": "Tromsø", "n": [1, 2.5, null], "deep": {"a": "\\"<b>"}}'
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Tromsø? <b>&amp;"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": None}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": '{"sky": "clear"}'},
    {"role": "assistant", "content": "Clear."},
    {"role": "user", "content": "Thanks"},
]


def with_arguments(arguments: object) -> list[dict]:
    messages = json.loads(json.dumps(MESSAGES))
    messages[2]["tool_calls"][0]["function"]["arguments"] = arguments
    return messages


@pytest.mark.parametrize("template", [QWEN, TEMPLATE, ODDS], ids=["qwen", "embedded", "odds"])
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "plain"])
def test_same_bytes_as_transformers(template, tools):
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template(
        [with_arguments(json.loads(ARGUMENTS))], tools=tools, chat_template=template, add_generation_prompt=True
    )
    ours = ChatTemplate(template).render(with_arguments(generated_arguments(ARGUMENTS)), tools)
    assert ours == theirs[0]


TRIMMING = "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}</s>{% endfor %}"


@pytest.mark.parametrize("template", [QWEN, TEMPLATE, TRIMMING], ids=["qwen", "embedded", "trimming"])
@pytest.mark.parametrize("text", ["The", "The ", " The\n\n", "e</s>", "The </think> é", "The \ufdd1 \ufdd0 "])
def test_a_message_is_left_open_as_transformers_does_it(template, text):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    [theirs], _ = render_jinja_template([messages], chat_template=template, continue_final_message=True)
    model = replace(MODEL, template=ChatTemplate(template))
    given = [Message(message["role"], message["content"]) for message in messages]
    assert model.render(given, (), Rendering(continued=True)) == theirs.replace("\ufdd0", "\ufffd")


def test_of_a_list_of_templates_the_one_for_tools_is_for_tools(tmp_path):
    """And neither loses a space."""
    plain, asked = "\n  {{ messages[0].content }}\n  ", "  {{ tools | length }}{% for one in tools %}\n {% endfor %}\n"
    settings = {"chat_template": [{"name": "default", "template": plain}, {"name": "tool_use", "template": asked}]}
    both, messages = ChatTemplate(_template_text(tmp_path, settings)), [{"role": "user", "content": "Hi"}]
    for own, tools in ((plain, None), (asked, [{"a": 1}, {}])):
        assert both.render(messages, tools) == ChatTemplate(own).render(messages, tools)
    del settings["chat_template"][1]
    assert _template_text(tmp_path, settings) == plain


def test_a_message_that_is_not_shown_cannot_be_continued():
    for template in ("nothing", "{% for message in messages[:-1] %}{{ message.content }}{% endfor %}"):
        model = replace(MODEL, template=ChatTemplate(template))
        with pytest.raises(InvalidRequest, match="does not show the last message"):
            model.render([Message("user", "a"), Message("assistant", "b")], (), Rendering(continued=True))


@pytest.mark.parametrize("template", [QWEN, TEMPLATE], ids=["qwen", "embedded"])
@pytest.mark.parametrize(
    "arguments", ['{"city":"Oslo"}', '{ "a" :1e3 }', '{"a": 1, "a": 2}', '{"cut": "he', "[1]", "{}"]
)
def test_arguments_are_rendered_as_generated(template, arguments):
    text = ChatTemplate(template).render(with_arguments(generated_arguments(arguments)), TOOLS)
    assert f'"arguments": {arguments}}}\n</tool_call>' in text


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ '%s' | format(self._TemplateReference__context) | attr('__class__') }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_the_sandbox_holds(attack):
    messages = [{"role": "user", "content": "x"}]
    try:
        text = ChatTemplate(attack).render(messages, None)
    except InvalidRequest:
        text = ""
    assert "class" not in text and "uid=" not in text and "module" not in text
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "attack",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * messages }}",
        "{{ 9**(9**9) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ messages[0].content.ljust(width=10**9) }}",
        "{{ messages[0].content | center(10**17) }}",
    ],
)
def test_nothing_grows_beyond_all_measure(attack):
    begin = time.process_time()
    with pytest.raises(InvalidRequest, match="cannot render"):
        ChatTemplate(attack).render([{"role": "user", "content": "x"}], None)
    assert time.process_time() - begin < 0.5


def test_a_template_may_refuse():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render([], None)


def test_rendering_does_not_look_up_what_the_template_reads():
    template = ChatTemplate(TEMPLATE)
    template.render([{"role": "user", "content": "x"}], None)
    template.resume([{"role": "user", "content": "x"}], None, None)
    assert "variables" not in vars(template)


def test_a_malformed_template_is_named():
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for a in messages %}" * 30 + "x" + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{% break %}", "'break' outside loop"),
        ("{{ dict(a=1, a=2) }}", "keyword argument repeated"),
        ("{% macro m(a, a) %}{% endmacro %}", "duplicate argument"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
        ("{% if a %}" * 300 + "{% endif %}" * 300, "nested too deeply"),
        ("{{ " + "9" * 5000 + " }}", "limit"),
        ("{% autoescape 'a' | center(9) %}{% endautoescape %}", "autoescape must be true or false"),
    ],
)
def test_what_no_process_could_render_is_refused_when_the_model_is_read(source, reason):
    with pytest.raises(ValueError, match=reason):
        ChatTemplate(source)


@pytest.mark.parametrize("source", ["{{ 1e999 | int }}", "{{ 'abc' | truncate(-5) }}", "{{ messages.foo() }}"])
def test_whatever_a_template_raises_is_a_refusal(source):
    template = ChatTemplate(source)
    for rendered in (template.render, lambda *asked: template.resume(*asked, None)):
        with pytest.raises(InvalidRequest, match="cannot render these"):
            rendered([{"role": "user", "content": "hi"}], None)


@pytest.mark.parametrize("expression", ["'a' | center(10**8)", "'%100000000d' | format(1)", "[1] | list | join"])
def test_nothing_is_computed_when_a_template_is_made(expression):
    """The gateway makes it; what is costly in it belongs to the process that renders."""
    begin = time.process_time()
    template = ChatTemplate(f"{{{{ {expression} }}}}{{% set x = {expression} %}}{{{{ y }}}}")
    template.compile()
    assert template.variables == {"y"}
    assert time.process_time() - begin < 0.1


def test_nothing_heavy_is_imported():
    heavy = "{'torch', 'transformers', 'numpy', 'grpc'}"
    code = f"import sys, penstock.chat.model, penstock.chat.sessions; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"

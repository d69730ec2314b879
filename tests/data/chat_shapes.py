"""Short chat templates in the style of published models.

For the chats in these tests each writes the same text as its model's template. `MARKED` are the
same with `{% generation %}` around the assistant's text, for transformers' own masks.
"""

import json
from pathlib import Path

from tests.data.texts import save_tokenizer

_TOOLS = """
{%- macro call(c) %}{%- set f = c.function if c.function else c %}
{{- '<tool_call>\\n' + {'name': f.name, 'arguments': f.arguments} | tojson + '\\n</tool_call>' }}
{%- endmacro %}
"""
CHATML = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}[[{{ m.content + '<|im_end|>\\n' }}]]
    {%- else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
QWEN25 = (
    _TOOLS
    + """
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role ==
        'system' else 'Help.') }}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>system\\nHelp.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}[[
        {%- if m.content %}{{ m.content }}{% endif %}
        {%- for c in m.tool_calls or [] %}
            {%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}{{ call(c) }}
        {%- endfor %}{{ '<|im_end|>\\n' }}]]
    {%- elif m.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}
            {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
)
QWEN3 = (
    _TOOLS
    + """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(looking=true, last=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- if ns.looking and m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set ns.looking = false %}{% set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}[[
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{ content }}{% endif %}
        {%- for c in m.tool_calls or [] %}
            {%- if content or not loop.first %}{{ '\\n' }}{% endif %}{{ call(c) }}
        {%- endfor %}{{ '<|im_end|>\\n' }}]]
    {%- elif m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}
            {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
)
LLAMA32 = """
{{- bos_token }}
{%- if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}
{%- else %}{% set today = '26 Jul 2024' %}{% endif %}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + today + '\\n\\n' + system +
    '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- set f = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}[[
        {{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}<|eot_id|>' }}]]
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson +
            '<|eot_id|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}[[{{ m.content | trim +
            '<|eot_id|>' }}]]
    {%- elif not loop.first or m.role != 'system' %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and loop.index0 < 2 and m.role == 'user' %}
            {%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}{% endif %}
        {{- m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
    {%- endif %}
"""
PHI3 = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{ '<|assistant|>\\n' }}[[{{ m.content + '<|end|>\\n' }}]]
    {%- else %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}
{%- elif messages[-1].role == 'assistant' %}[[{{ eos_token }}]]{% else %}{{ eos_token }}{% endif %}
"""
DEEPSEEK_V2 = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ 'User: ' + m.content + '\\n\\n' }}
    {%- elif m.role == 'assistant' %}{{ 'Assistant:' }}[[{{ ' ' + m.content + eos_token }}]]
    {%- else %}{{ m.content + '\\n\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
DEEPSEEK_R1 = """
{%- set ns = namespace(system='', tool=false, first=true, output=true) %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}
    {%- endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.tool = false %}{{ '<User>' + m.content }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {%- set ns.tool = false %}{{ '<Assistant>' }}[[{{ m.content or '' }}{{ '<calls>' }}
        {%- for c in m.tool_calls %}
            {{- '<call>' + c.function.name + '<sep>' + c.function.arguments | tojson + '</call>' }}
        {%- endfor %}{{ '</calls>' + eos_token }}]]
    {%- elif m.role == 'assistant' and ns.tool %}
        {%- set ns.tool = false %}{{ '</outputs>' }}[[{{ m.content + eos_token }}]]
    {%- elif m.role == 'assistant' %}
        {{- '<Assistant>' }}[[{{ m.content.split('</think>')[-1] + eos_token }}]]
    {%- elif m.role == 'tool' %}
        {{- ('' if ns.tool else '<outputs>') + '<output>' + m.content + '</output>' }}
        {%- set ns.tool = true %}
    {%- endif %}
{%- endfor %}
{%- if ns.tool %}{{ '</outputs>' }}{% endif %}
{%- if add_generation_prompt and not ns.tool %}{{ '<Assistant><think>\\n' }}{% endif %}
"""
GEMMA3 = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {%- if m.role == 'assistant' %}[[{{ m.content | trim + '<end_of_turn>\\n' }}]]
    {%- else %}{{ (first if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
        {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
MISTRAL = """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m.role == 'user' %}
        {%- if tools and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | map(attribute='function') | list | tojson +
                '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}
        {%- else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}
    {%- elif m.tool_calls %}
        [[{{- '[TOOL_CALLS] [' }}
        {%- for c in m.tool_calls %}
            {{- {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}]]
    {%- elif m.role == 'assistant' %}[[{{ ' ' + m.content | trim + eos_token }}]]
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
ZEPHYR = """
{%- for m in messages %}
    {{- '<|' + m.role + '|>\\n' }}
    {%- if m.role == 'assistant' %}[[{{ m.content + eos_token + '\\n' }}]]
    {%- else %}{{ m.content + eos_token + '\\n' }}{% endif %}
    {%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
{%- endfor %}
"""
GPT_OSS = """
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- if tools or messages[0].role in ('system', 'developer') %}
    {{- '<|start|>developer<|message|>' }}
    {%- if messages[0].role != 'user' %}{{ messages[0].content }}{% endif %}
    {%- for tool in tools or [] %}{{ '\\ntype ' + tool.function.name + ' = () => any;' }}
        {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(tool=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- set c = m.tool_calls[0].function %}{% set ns.tool = c.name %}
        {%- set later = namespace(answers=false) %}
        {%- for x in messages[loop.index:] %}
            {%- if x.role == 'assistant' and not x.tool_calls %}{% set later.answers = true %}
                {%- endif %}
        {%- endfor %}
        {{- '<|start|>assistant' }}[[
        {%- if m.thinking and not later.answers %}
            {{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}
                {%- endif %}
        {{- ' to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}
        {{- c.arguments | tojson + '<|call|>' }}]]
    {%- elif m.role == 'assistant' %}
        {%- set last = loop.last and not add_generation_prompt %}
        {{- '<|start|>assistant' }}[[
        {%- if last and m.thinking %}
            {{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}
                {%- endif %}
        {{- '<|channel|>final<|message|>' + m.content + ('<|return|>' if last else '<|end|>') }}]]
        {%- set ns.tool = none %}
    {%- elif m.role == 'tool' %}
        {%- if ns.tool is none %}{{ raise_exception('no call before') }}{% endif %}
        {{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
GLM = """
{{- '[gMASK]' }}
{%- for m in messages %}
    {{- '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}[[{{ '\\n' + m.content }}]]
    {%- else %}{{ '\\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
_SHAPES = {
    "chatml": CHATML,
    "qwen25": QWEN25,
    "qwen3": QWEN3,
    "llama32": LLAMA32,
    "phi3": PHI3,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_r1": DEEPSEEK_R1,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "gpt_oss": GPT_OSS,
    "glm": GLM,
}
PLAIN = {name: x.replace("[[", "").replace("]]", "") for name, x in _SHAPES.items()}
MARKED = {
    name: x.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")
    for name, x in _SHAPES.items()
}
NO_TOOLS = ("chatml", "phi3", "deepseek_v2", "gemma3", "zephyr", "glm")

_SPECIAL_TOKENS = """
<s> <|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|>
<|eot_id|> <|system|> <|user|> <|assistant|> <|end|> <|endoftext|> <User> <Assistant> <think>
</think> <calls> </calls> <call> </call> <sep> <outputs> </outputs> <output> </output>
<start_of_turn> <end_of_turn> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS]
[TOOL_RESULTS] [/TOOL_RESULTS] <|start|> <|message|> <|channel|> <|return|> <|call|> [gMASK]"""


def save_chat_tokenizer(folder: Path, template: str | None = None, **settings: object) -> Path:
    """Return a folder with a tokenizer that has the tokens of all templates."""
    from tokenizers import Tokenizer

    save_tokenizer(folder)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(_SPECIAL_TOKENS.split())
    made.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, **settings}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a <city> & more é",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call(name: str = "weather", **arguments: object) -> dict:
    """A message that calls a tool."""
    function = {"name": name, "arguments": arguments or {"city": "Rome"}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def said(role: str, content: str, **more: object) -> dict:
    return {"role": role, "content": content, **more}

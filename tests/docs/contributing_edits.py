"""The rows of CONTRIBUTING's table "Where something new goes", each followed for an example.

Row -> edits: a file of the package, what stands before the addition (none: the file ends with it),
and what is added.
"""

import json

EXAMPLE = "an_example: k.NotNegative = Field(default=0.0, description='Of the gradient.')"
_DEFAULTS = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.018042,
    "tie_word_embeddings": True,
    "use_bias": True,
    "head_dim": None,
    "pad_token_id": None,
}


def _layer(kind: str, name: str, size: str, inputs: str, heads: str | None) -> dict[str, object]:
    shape = [size, inputs]
    return {"is": kind, "name": name, "shape": shape, "heads": heads, "bias": "use_bias"}


def _norm(name: str) -> list[dict[str, object]]:
    how = {"shape": ["dim"], "partial": False}
    return [
        {"is": "whole", "name": f"{name}.weight", "start": "ones", **how},
        {"is": "whole", "name": f"{name}.bias", "start": "zeros", **how},
    ]


STARCODER2 = {
    "class": "Starcoder2ForCausalLM",
    "defaults": _DEFAULTS,
    "nullable": [],
    "blocks": "model.layers",
    "table": "model.embed_tokens",
    "output": "lm_head",
    "documents": "positions",
    "own_attention": "",
    "uses_is_causal": True,
    "order": {"is_listed": True, "is_parallel": False, "ends_in_norm": False},
    "block": [
        {"is": "attention", "name": "self_attn", "counts": {"num_key_value_groups": "groups"}},
        _layer("column", "self_attn.q_proj", "heads*head_dim", "dim", "heads"),
        _layer("column", "self_attn.k_proj", "kv_heads*head_dim", "dim", "kv_heads"),
        _layer("column", "self_attn.v_proj", "kv_heads*head_dim", "dim", "kv_heads"),
        _layer("row", "self_attn.o_proj", "dim", "heads*head_dim", "heads"),
        _layer("column", "mlp.c_fc", "hidden", "dim", None),
        _layer("row", "mlp.c_proj", "dim", "hidden", None),
        *_norm("input_layernorm"),
        *_norm("post_attention_layernorm"),
    ],
    "head": _norm("model.norm"),
}
"""What `scripts/families` writes of it."""

SUM_PARTS = """
from dataclasses import dataclass
import torch.distributed as dist
from torch import Tensor
from torchdistpackage.comm.autograd import KINDS, AllGather, ReduceScatter, apply
from torchdistpackage.comm.collectives import as_dim, as_group, by_name
from torchdistpackage.comm.primitives import Group, Result
from torchdistpackage.comm.work import NO_FACTS, Work, run_async, run_sync

def call(x, group, async_op=False):
    if group.size() == 1:
        return Work(x) if async_op else x
    total = x.clone()
    finish = lambda: total.chunk(group.size())[group.rank()]
    go = run_async if async_op else run_sync
    return go('sum_parts', group, x, NO_FACTS, finish, dist.all_reduce, total)

@dataclass(frozen=True, slots=True)
class SumParts:
    group: Group
    dim: int
    def __call__(self, x, calls=None):
        return call(x.movedim(self.dim, 0), self.group).movedim(0, self.dim).contiguous()
    def transposed(self):
        return AllGather(self.group, self.dim, None)
    def code(self):
        return 'sum_parts', (self.dim,), None, None
    answer = ReduceScatter.answer

KINDS['sum_parts'] = lambda group, first, second, dim: SumParts(group, dim)

def sum_parts(x: Tensor, dim: int, group: Group | str) -> Tensor:
    return apply(SumParts(as_group(group), as_dim(x, dim)), x)

start_sum_parts = by_name(call, 'start_sum_parts', async_op=True)
"""

ONE_GATHER = """
import torch
from torchdistpackage.parallel.context.exchange import GatheredKeys

class OneGather(GatheredKeys):
    def run_forward(self, k, v, forward):
        work = self._begin(torch.cat((k, v), 1))
        forward(self._own, k, v)
        keys, values = work.wait().movedim(0, 2).chunk(2, 1)
        for span, tasks in self._others:
            if tasks:
                forward(tasks, keys[:, :, span], values[:, :, span])
"""
ONE_GATHER_ROW = """
        ExchangeSpec('one_gather', gathered_bytes, _one_gather_calls, gathered_time,
            'torchdistpackage.parallel.context.one_gather:OneGather',
            does='collects both at once', formula='6', causal='6', hidden='some', wins='rarely'),
"""
IMPORTANCE = """
def importance(shape, scores, experts, groups, state):
    return shape.num_experts * scores.mean(0).square().sum(-1).mean()

def by_hand(shape, busy, share):
    return shape.num_experts * sum(n * n for n in share.flatten()) / len(share)
"""

EDITS: dict[str, list[tuple[str, str, str]]] = {
    "a pipeline schedule": [
        (
            "schedule/orders.py",
            "",
            "import dataclasses\n"
            "def fill_drain(num_ranks, num_microbatches, chunks):\n"
            "    order = gpipe(num_ranks, num_microbatches, chunks)\n"
            "    return dataclasses.replace(order, name='fill-drain')\n",
        ),
        (
            "schedule/generators.py",
            r"GENERATORS: dict\[str, Generator\] = \{\n",
            "'fill-drain': fill_drain,\n",
        ),
        (
            "schedule/generators.py",
            r"from torchdistpackage.schedule.orders import \(\n",
            "    fill_drain,\n",
        ),
    ],
    "a split layer": [
        (
            "parallel/tensor/scale.py",
            "",
            "import torch\n"
            "from torchdistpackage.parallel.tensor import layouts as cut\n"
            "from torchdistpackage.parallel.tensor.marked import Marked\n"
            "class Scale(Marked):\n"
            "    def __init__(self, dim):\n"
            "        super().__init__()\n"
            "        self.weight = torch.nn.Parameter(torch.ones(dim))\n"
            "    def forward(self, x):\n"
            "        return x * self.weight\n"
            "    def layouts(self):\n"
            "        return cut.norm(len(self.weight), False, 'tensor', False)\n",
        )
    ],
    "a communication hook": [
        (
            "ddp/comm_hooks.py",
            "",
            "def float32_compress(flat, group, op=primitives.SUM):\n"
            "    return _narrow(flat, group, op, torch.float32)\n",
        )
    ],
    "a collective": [
        ("comm/part_sums.py", "", SUM_PARTS),
        (
            "comm/collective_table.py",
            r'        CollectiveSpec\("reduce_to".*\n',
            "        CollectiveSpec('sum_parts', 'comm.part_sums',\n"
            "            ('sum_parts', 'start_sum_parts'),\n"
            "            map='torchdistpackage.comm.part_sums:SumParts', takes='P', gives='V',\n"
            "            call='torchdistpackage.comm.part_sums:call',\n"
            "            torch=f'{_BY_TORCH}:reduce_scatter',\n"
            "            signature='x, dim, group', returns='a part of the sum',\n"
            "            backward='`all_gather`', use='partial sums', bus_factor=_others_share,\n"
            "            output_is_part=True, in_parts=True, is_sum=True),\n",
        ),
    ],
    "an exchange over context": [
        ("parallel/context/one_gather.py", "", ONE_GATHER),
        ("layout/exchanges.py", r"    for spec in \(\n", ONE_GATHER_ROW),
        (
            "layout/exchanges.py",
            r"_CLASSES = .*\n",
            "def _one_gather_calls(attention, blocks, index, elements, is_forward):\n"
            "    if is_forward:\n"
            "        positions = sum(map(len, blocks[index]))\n"
            "        yield ExchangeCall('all_gather', positions * elements, True)\n"
            "    else:\n"
            "        yield from gathered_calls(attention, blocks, index, elements, False)\n",
        ),
    ],
    "a balance of experts": [
        ("parallel/expert/importance.py", "", IMPORTANCE),
        (
            "layout/balances.py",
            r'        BalanceSpec\("none".*\n',
            "        BalanceSpec('importance',\n"
            "            loss='torchdistpackage.parallel.expert.importance:importance',\n"
            "            by_hand='torchdistpackage.parallel.expert.importance:by_hand',\n"
            "            does='adds squares of scores', what='squares', over='a rank'),\n",
        ),
    ],
    "a format of data files": [
        (
            "data/tokens/csv_rows.py",
            "",
            "import csv\n"
            "from torchdistpackage.data.tokens.documents import Piece, TextFiles\n"
            "class CsvRows(TextFiles):\n"
            "    def documents(self, piece, field, reader, number):\n"
            "        with piece.path.open() as file:\n"
            "            for index, row in enumerate(csv.DictReader(file), number + 1):\n"
            "                yield reader(row, f'{piece.path}: row {index}')\n",
        ),
        (
            "config/data_section.py",
            r"    for spec in \(\n",
            "        DataSpec('csv', path='file or folder', has_rows=True, suffix='.csv',\n"
            "            reader='torchdistpackage.data.tokens.csv_rows:CsvRows',\n"
            "            in_blend=True, document='a row', needs='a header'),\n",
        ),
    ],
    "a source of token ids": [
        (
            "data/counting.py",
            "",
            "import numpy as np\n"
            "from torchdistpackage.data.corpus import Corpus\n"
            "def counting(val_fraction, counts_from):\n"
            "    ids = np.arange(counts_from, counts_from + 5000).astype(np.uint8)\n"
            "    return Corpus(ids, ids[:1000])\n",
        ),
        (
            "config/data_section.py",
            r"    for spec in \(\n",
            "        DataSpec('counting', ids='torchdistpackage.data.counting:counting',\n"
            "            keys=('counts_from',), document='all numbers'),\n",
        ),
        (
            "config/data_section.py",
            r"class DataSection\(NamedSection\):\n.*\n\n",
            "    counts_from: k.Count = Field(default=1, description='The first number.')\n",
        ),
    ],
    "a format of checkpoints": [
        (
            "checkpoint/formats/lists.py",
            "",
            "import json, torch\n"
            "from torchdistpackage.checkpoint.formats.source import TensorSource\n"
            "def write(source, path):\n"
            "    lists = {name: source.read(name).tolist() for name in source.tensors}\n"
            "    path.write_text(json.dumps(lists))\n"
            "def read(path):\n"
            "    lists = json.loads(path.read_text())\n"
            "    shapes = {n: ('float32', torch.tensor(x).shape) for n, x in lists.items()}\n"
            "    return TensorSource(shapes, lambda name: torch.tensor(lists[name]))\n",
        ),
        (
            "checkpoint/formats/table.py",
            r"    for spec in \(\n",
            "        FormatSpec('lists', write='torchdistpackage.checkpoint.formats.lists:write',\n"
            "            read='torchdistpackage.checkpoint.formats.lists:read',\n"
            "            target='JSON', source='JSON'),\n",
        ),
    ],
    "an optimizer": [
        (
            "train/optimizers.py",
            "",
            "def adagrad(groups, section):\n"
            "    return torch.optim.Adagrad(groups, lr=section.lr, fused=True)\n",
        ),
        (
            "config/optimizers.py",
            r"        OptimizerSpec\(\"sgd\".*\n",
            "        OptimizerSpec('adagrad', f'{_MAKERS}:adagrad', one_number, leaves_out=True,\n"
            "            state_keys=('sum',), state='r c'),\n",
        ),
    ],
    "a model family": [
        (
            "models/flat.py",
            "",
            "from torchdistpackage.models.gpt import GPT\n"
            "class Flat(GPT):\n"
            "    def forward(self, x):\n"
            "        out = super().forward(x)\n"
            "        return out if self.head is None else out * 0\n",
        ),
        (
            "models/flat_spec.py",
            "",
            "from torchdistpackage.models.gpt_spec import GPTSpec\n"
            "class FlatSpec(GPTSpec):\n"
            "    module = 'torchdistpackage.models.flat:Flat'\n",
        ),
        (
            "models/registry.py",
            r"MODELS: dict\[str, type\[ModelSpec\]\] = \{\n",
            "'flat': FlatSpec,\n",
        ),
        (
            "models/registry.py",
            r"from torchdistpackage.lazy import resolve\n",
            "from torchdistpackage.models.flat_spec import FlatSpec\n",
        ),
        ("config/types.py", r"ModelName = Literal\[", "'flat', "),
        ("configs/flat.yaml", "", "run: {name: flat}\nmodel: {name: flat, vocab: 256}\n"),
    ],
    "a family of transformers": [
        ("models/transformers_writer.py", r"\nWRITTEN = \(", '"starcoder2", '),
        ("families/written.json", r"^\{", f'"starcoder2": {json.dumps(STARCODER2)},'),
        ("families/registry.py", r"\*\*written\(\"llama\", ", '"starcoder2", '),
    ],
    "a check of the communication test": [
        (
            "harness/comm_checks.py",
            r'Check\("barrier", _barrier\),\n',
            'Check("a check that fails", _fails),\n',
        ),
        (
            "harness/comm_checks.py",
            "",
            "def _fails(member):\n    yield torch.zeros(1), torch.ones(1), ''\n",
        ),
    ],
    "an option of `ZeroOptimizer`": [
        (
            "ddp/zero/options.py",
            r"    master_dtype: torch.dtype \| None\n",
            "    sum_factor: float\n",
        ),
        (
            "ddp/zero/options.py",
            r"    master_dtype: torch.dtype \| None = None\n",
            "    sum_factor: float = 1.0\n",
        ),
        (
            "ddp/zero/grad_buffer.py",
            r"self\._first_flag = flags, .*\n",
            "        self._sum_factor = options.sum_factor\n",
        ),
        (
            "ddp/zero/grad_buffer.py",
            r"        .*to those since the last step.*\n",
            "        self._slice.mul_(self._sum_factor)\n",
        ),
    ],
    "a command of `tdp`": [
        ("cli/hello.py", "", "def hello() -> None:\n    'Greet.'\n    print('hello')\n"),
        ("cli/main.py", r"COMMANDS = \{", "'hello': 'Greet.', "),
    ],
    "an option of sbatch": [
        ("config/slurm.py", r"OPTIONS: dict\[str, OptionType\] = \{\n", "'an-option': _TEXT,\n")
    ],
    "a flag that all ranks agree on": [
        (
            "train/loop.py",
            r"        self.saver.register\(self.votes\)\n",
            "        self.votes.register('odd', lambda step: step % 2)\n",
        ),
    ],
    "a logged value": [
        (
            "plan/logged_values.py",
            r"VALUES = \(\n",
            "    LoggedValue('ranks', 'ranks', 'how many there are', ask=lambda loop, step: 1,\n"
            "        line=lambda result: f\"{result.measured['ranks']:g} ranks\"),\n"
            "    LoggedValue('mean_rank', '', 'their mean', ask=lambda loop, step:\n"
            "        loop.trainer.rank, reduce='mean'),\n"
            "    LoggedValue('nats', 'nats', 'of the step',\n"
            "        read=lambda result: result.loss * result.tokens),\n",
        ),
    ],
    "something a run does between steps": [
        (
            "train/callbacks.py",
            "",
            "class Greeting(Callback):\n"
            "    def on_step(self, loop, result, issued):\n"
            "        loop.log.note(greeting='hello', odd=result.votes['odd'])\n",
        ),
        (
            "train/build.py",
            r"    callbacks: list\[Callback\] = \[\]\n",
            "    callbacks.append(Greeting())\n",
        ),
        ("train/build.py", r"from torchdistpackage.train.callbacks import \(\n", "    Greeting,\n"),
    ],
    "a key of the YAML": [
        ("config/optim_section.py", r"class OptimSection\(Section\):\n.*\n\n", f"    {EXAMPLE}\n"),
        ("train/update.py", r"        halts: bool,\n", "        an_example: float = 0.0,\n"),
        (
            "train/update.py",
            r"        self._found_inf = .*\n",
            "        print(f'noise of the update: {an_example}')\n",
        ),
        (
            "train/build.py",
            r"            clip=optim.clip,\n",
            "            an_example=optim.an_example,\n",
        ),
    ],
}  # fmt: skip

"""Time on paper: what a step would take, from what its parts take. No torch, no processes.

calls       what a rank sends in a step, call by call; counted by parallel/tensor/numbers
            and plan/traffic.
links       the time of a message or a collective by its bytes (`LinkModel`), and the line through
            measured times.
devices     accelerators with the numbers of their data sheets; fitting has the few that are fitted.
workload    a transformer and a layout as numbers, whatever library runs them.
kernels     the time of a matmul, of attention and of element-wise work; collectives that of links.
layer       the operations of a block, there and back, and what its ranks wait for.
muon        the seconds of Muon's iterations; newton_schulz has their work, and who does it.
step        the seconds of a step as a sum of named terms (`step_time`).
step_memory the bytes of a rank of a published run, by kind; published_memory has such peaks.
published   steps that others measured, beside their predictions on the page of error_table.

Orders of a pipeline are timed by schedule/engine, of which simulation, synthesis and cuts are three
readers. A placed program has no order of its own but the program's, and nodes in place of stages:
`step_seconds` of compat/placed/placement_search is the critical path of that graph.

There is no one search over costs. Each stands on what its own problem allows, and would be an
argument of the other; laid side by side, three loops that keep what is cheaper share four lines.
What they do share is a contract: a plan depends on the costs and a fixed seed alone, none reads a
clock, so that every rank finds the same; and no plan is worse than its start.

schedule/order_search                 list scheduling under varied rules: an order must be free of
                                      deadlock and within memory at each point of time
pipeline/partition/cost_split         dynamic programming on the largest sum: stages are intervals
pipeline/partition/cut_search         a beam over open ranks where one has several stages, and
                                      annealing near the best known where that is too wide
compat/placed/placement_search      all placements of few nodes, else descent by moves of a node
plan/layout_search                    best first, by bounds that are refined until they are a step
plan/node_order                       all labels of places by switches, else exchanges of two nodes
tools/recompute                       a knapsack of seconds and bytes, exact on a grid of bytes
ddp/bucket_tuning, ddp/auto           a handful of candidates, each priced in closed form
"""

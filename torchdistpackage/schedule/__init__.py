"""Pipeline schedules as data: made, checked, timed and drawn without a device. No torch.

Values          actions (F, B, I, W, messages; Schedule), costs (times by stage, and their file).
By name         generators (names, `build`) on orders (GPipe, 1F1B, interleaved, zero bubble, V);
                resolve (what a user means: a name, a Schedule, a table of torch's).
Lowering        passes (messages placed, batched, posted early; `lower`; `check`: complete, in
                order, free of deadlock).
Simulation      engine (an order as numbers, timed; times, bubble, activations held).
By search       autoschedule (never longer than the best by name) on list_scheduling and
                order_search.
After a run     trace_costs (costs from measured spans, and why ranks idled).
Files           draw (table, SVG, PNG, Chrome trace).
"""

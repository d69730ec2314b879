"""Pipeline schedules as data: made, checked, timed and drawn without a device. No torch.

Values          actions (F, B, I, W, messages; Schedule), costs (times by stage, and their file).
By name         generators/: one_f_one_b (GPipe, 1F1B, interleaved), zero_bubble, v_shape, and
                registry (names, `build`).
Lowering        passes (messages placed, batched, posted early; `lower`), check (complete, in
                order, free of deadlock).
Simulation      engine (an order as numbers, timed), timeline (times, bubble, activations held).
By search       autoschedule/: list_scheduling, rule_search, local_search, and synthesize (never
                longer than the best by name).
After a run     trace_costs (costs from measured spans, and why ranks idled).
Files           draw (table, SVG, PNG), trace, csv (torch's format).
"""

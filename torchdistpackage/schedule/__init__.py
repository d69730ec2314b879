"""Pipeline schedules as data, built, checked, simulated and drawn without a device. No torch.

Values          actions (F, B, I, W, messages; Schedule), costs (times by stage, and their file).
By name         generators (names, `build`) on orders (GPipe, 1F1B, interleaved, zero bubble, V);
                resolve (turns a user's name, Schedule or torch table into a Schedule).
Lowering        passes (place messages, batch them, post them early; `lower`; `check`: complete, in
                order, free of deadlock).
Simulation      engine (times an order given as numbers; times, bubble, activations held).
By search       autoschedule (never longer than the best named one) on list_scheduling and
                order_search.
After a run     trace_costs (costs from measured spans, and why ranks idled).
Files           draw (table, SVG, PNG, Chrome trace).
"""

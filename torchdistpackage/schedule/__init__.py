"""Pipeline schedules as data: made, checked, timed and drawn without a device. No torch.

Values          actions (F, B, I, W, messages; Schedule), costs (times by stage).
By name         generators/: registry (names, `build`), one_f_one_b, interleaved and zero_bubble on
                warmup_steady, v_shape.
By search       autoschedule/: list_scheduling, merge_backward, rule_search, local_search, and
                synthesize (never longer than the best by name), on engine (an order as numbers).
Lowering        passes (messages placed, batched, posted early), check (complete, in order, free of
                deadlock).
Simulation      timeline (times, bubble, activations held).
After a run     trace_costs (costs from measured spans), bubble_attribution (why ranks idled).
Files           draw, draw_png, trace, csv (torch's format), costs_file.
"""

"""Who computes what when, as data: made, checked, timed and drawn without a device. No torch.

The values        actions (F, B, I, W, messages; Schedule), costs (how long each takes, by stage).
Orders by name    generate (the names, `build`); one_chunk, interleaved, zero_bubble on turns; vee.
Orders by search  work (an order as numbers), greedy (list scheduling), rejoin (splits that gain
                  nothing made whole), search and improve, synthesize (never longer than stock).
Made ready        passes (messages placed, batched, posted early), check (complete, ordered, never
                  stuck).
On paper          simulate (Timeline: times, bubble, microbatches held).
Beside a run      measured (costs from spans), gap (why ranks idled).
To see and keep   draw, draw_png, trace; csv (torch's format), costs_file.
"""

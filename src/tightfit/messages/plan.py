"""What is said about plans: why this way and not another, what would make a job fit, how a failed one goes on."""

from tightfit.messages import Texts

TEXTS: Texts = {
    # --- the ways -------------------------------------------------------------------------------
    "zero0": ("unsharded", "不切分"),
    "one-place": ("{engine}, optimizer + weights on {place}", "{engine}，优化器和权重卸载到 {place}"),
    "two-places": (
        "{engine}, optimizer on {place}, weights on {other}",
        "{engine}，优化器卸载到 {place}，权重卸载到 {other}",
    ),
    "optimizer-away": ("{engine}, optimizer on {place}", "{engine}，优化器卸载到 {place}"),
    "weights-away": ("{engine}, weights on {place}", "{engine}，权重卸载到 {place}"),
    "on-gpus": ("{way} on {count} GPUs", "{way}（{count} 张 GPU）"),
    "on-one-gpu": ("{way} on one GPU", "{way}（1 张 GPU）"),
    "each-gpu": ("each GPU", "每张 GPU"),
    "the-gpu": ("the GPU", "该 GPU"),
    "checkpointing-none": ("none", "无"),
    "checkpointing-full": ("full", "全部"),
    # --- what was chosen, and why ---------------------------------------------------------------
    "default-batch": (
        "No --effective-batch was named: {batch} sequences a step, {per_gpu} a GPU.",
        "没有指定 --effective-batch：每步 {batch} 条序列，每张 GPU {per_gpu} 条。",
    ),
    "chosen-way": ("Chosen: {way}.", "选定方案：{way}。"),
    "free-memory": (
        "Needs {needed} of {size} GiB on {where}: {spare} GiB ({share:.1%} of the card) stays free.",
        "{where} 需要 {size} GiB 显存中的 {needed} GiB，剩余 {spare} GiB（占整卡 {share:.1%}）。",
    ),
    "some-layers-recompute": (
        "{depth} of {total} layers recompute their activations: with {fewer} {where} would need {need} GiB.",
        "{total} 层中有 {depth} 层使用梯度检查点（重计算激活）：若只用 {fewer} 层，{where} 需要 {need} GiB。",
    ),
    "a-gpu": ("a GPU", "每张 GPU"),
    "no-layer-recomputes": (
        "No layer recomputes: there is room for all activations.",
        "没有任何层需要重计算：显存放得下全部激活值。",
    ),
    "fused-loss": (
        "The fused loss never holds all logits at once; the result is the same.",
        "融合损失不会同时保存全部 logits，结果不变。",
    ),
    "loss-from-liger": (
        "{trainer} takes it from Liger: pip install liger-kernel.",
        "{trainer}用 Liger 的融合损失：pip install liger-kernel。",
    ),
    "flash-windows": (
        "The layers' windows are cut by flash attention, a package of its own: --attention sdpa does without.",
        "滑动窗口由 flash-attn 处理，需要单独安装这个包；--attention sdpa 不需要它。",
    ),
    "fewer-gpus": (
        "{used} of the {all} GPUs {used:is|are} used: with all of them, what they exchange takes longer "
        "than what they save, or the host runs short.",
        "{all} 张 GPU 中只用 {used} 张：全部使用时，通信耗时超过节省的时间，或主机内存不足。",
    ),
    "largest-cause": (
        "Of each step's {step_s:.2f} s, {share:.0%} is {cause}.",
        "每步 {step_s:.2f} 秒中，{share:.0%} 用于{cause}。",
    ),
    "calibrated-by": (
        "Calibrated by {by} from a run on {day} (--no-calibration leaves it out).",
        "已根据 {day} 的一次运行校准 {by}（--no-calibration 可关闭）。",
    ),
    "calibrated-otherwise": (
        "Calibrated by {by} from a run on {day}, which ran another way (--no-calibration leaves it out).",
        "已根据 {day} 的一次运行校准 {by}，那次运行使用另一种方案（--no-calibration 可关闭）。",
    ),
    "card-and-ram": (
        "{gpu} GiB and {ram} GiB of host RAM a rank",
        "显存 {gpu} GiB、每个 rank 主机内存 {ram} GiB",
    ),
    "card-alone": ("{gpu} GiB", "显存 {gpu} GiB"),
    "ram-alone": ("{ram} GiB of host RAM a rank", "每个 rank 主机内存 {ram} GiB"),
    "host-ram-unknown": (
        "The host's RAM is not known (--host-ram 256GB, say): every way is taken to have enough.",
        "主机内存大小未知（可用 --host-ram 256GB 指定）：假定每种方案都够用。",
    ),
    "zero-left-out": (
        "ZeRO's stages are left out: only FSDP2 and the unsharded engine keep 8-bit states parameter by parameter, as "
        "a checkpoint needs them.",
        "不考虑 ZeRO 各阶段：只有 FSDP2 和不切分的引擎按参数保存 8 位状态，这是检查点所需要的。",
    ),
    "no-change-needed": (
        "This fits as it is: none of the allowed changes was made.",
        "无需改动即可放下：允许的改动都没有使用。",
    ),
    "changes-training": ("It changes the training: {change}.", "训练因此改变：{change}。"),
    "nothing-without-change": ("Without a change nothing fits. {nearest}", "不改动则没有方案放得下。{nearest}"),
    "nothing-free": ("Nothing free fits. {nearest}", "没有不改变训练结果的方案放得下。{nearest}"),
    "nearest-way": (
        "The nearest is {way} with checkpointing {word}: it {missing}.",
        "最接近的是 {way}（梯度检查点：{word}）：{missing}。",
    ),
    "faster-but": ("{way:capital} would be faster but {missing}.", "{way:capital} 会更快，但{missing}。"),
    "fits-too": (
        "{way:capital} fits too and takes {much} longer, mostly by {cause}.",
        "{way:capital} 也放得下，但慢 {much}，主要因为{cause}。",
    ),
    "less-than-a-percent": ("less than 1%", "不到 1%"),
    "cause-arithmetic": ("arithmetic", "矩阵运算"),
    "cause-memory-traffic": ("memory traffic", "显存读写"),
    "cause-recomputation": ("recomputation", "重计算"),
    "cause-dequantisation": ("dequantisation", "反量化"),
    "cause-optimizer": ("optimizer", "优化器更新"),
    "cause-communication": ("communication", "通信"),
    "cause-host-link": ("host link", "CPU 与 GPU 间传输"),
    "cause-host-optimizer": ("host optimizer", "CPU 上的优化器更新"),
    "cause-launch-overhead": ("launch overhead", "内核启动开销"),
    "trainer-ours": ("tightfit's own worker", "tightfit 自带的训练进程"),
    "trainer-llamafactory": ("LLaMA-Factory", "LLaMA-Factory"),
    "trainer-hugging-face": ("Hugging Face's Trainer", "Hugging Face 的 Trainer"),
    # --- what does not fit ----------------------------------------------------------------------
    "lacks-card": ("needs {size} GiB more than the card has {place}", "{place}显存还差 {size} GiB"),
    "leaves-little": (
        "would leave only {size} GiB of the card free {place}",
        "{place}显存只剩 {size} GiB，低于预留",
    ),
    "lacks-host": ("needs {more}", "还需要{more}"),
    "lacks-card-and-host": ("{card}, and {more}", "{card}，还差{more}"),
    "leaves-little-and-host": ("{card}, and needs {more}", "{card}，还差{more}"),
    "more-ram": ("{size} GiB more host RAM than there is", "主机内存 {size} GiB"),
    "more-nvme": ("{size} GiB more NVMe than there is", "NVMe 空间 {size} GiB"),
    "more-ram-and-nvme": ("{ram} and {nvme}", "{ram}以及 {nvme}"),
    "does-not-fit": ("does not fit", "放不下"),
    "at-init": ("while it is set up", "初始化时"),
    "at-forward": ("in the forward pass", "前向传播时"),
    "at-loss": ("at the loss", "计算损失时"),
    "at-backward": ("in the backward pass", "反向传播时"),
    "at-step": ("at the optimizer step", "优化器更新时"),
    "at-eval": ("in the eval pass", "评估时"),
    "at-save": ("in the save pass", "保存时"),
    "no-engine": (
        "No engine runs what was asked for: fewer pinned levers would leave a choice.",
        "没有引擎能运行这样的设置：少固定几个选项才有选择余地。",
    ),
    # --- what would make it fit -----------------------------------------------------------------
    "mildest-change": (
        "The mildest change that would fit is --allow {allowance}: {cost}; {effect} ({way}, {pace:,.0f} tokens/s).",
        "对结果影响最小的可行改动是 --allow {allowance}：{cost}；{effect}（{way}，{pace:,.0f} tokens/s）。",
    ),
    "other-change": (
        "--allow {allowance} would do as well: {cost}; {effect} ({way}, {pace:,.0f} tokens/s).",
        "--allow {allowance} 也可以：{cost}；{effect}（{way}，{pace:,.0f} tokens/s）。",
    ),
    "no-change-fits": (
        "None of the changes that can be allowed would make it fit, and no two of them together.",
        "可允许的改动中没有一个能让它放得下，任意两个组合也不行。",
    ),
    "gpus-would-do": (
        "Without any change, {gpus} of these GPUs would do.",
        "不做任何改动时，{gpus} 张这样的 GPU 就够。",
    ),
    "gpus-would-do-pinned": (
        "Without any change and with the pinned levers, {gpus} of these GPUs would do.",
        "不改动并保持固定的选项时，{gpus} 张这样的 GPU 就够。",
    ),
    "no-gpus-would-do": (
        "No number of these GPUs would do without a change.",
        "不做改动的话，再多这样的 GPU 也不够。",
    ),
    "no-gpus-would-do-pinned": (
        "No number of these GPUs would do without a change and with the pinned levers.",
        "不改动并保持固定的选项时，再多这样的 GPU 也不够。",
    ),
    "allowed-idle": ("--allow {name} is without effect: {why}.", "--allow {name} 不起作用：{why}。"),
    "allowed-in-vain": ("--allow {names}: not enough.", "--allow {names}：不够。"),
    "allowed-together-in-vain": (
        "--allow {names}: not enough, alone or together.",
        "--allow {names}：单独或一起都不够。",
    ),
    "needs-lora-beside": (
        "{what}, so it needs lora beside it (--allow lora,{allowance})",
        "{what}，需要同时允许 lora（--allow lora,{allowance}）",
    ),
    "only-frozen-quantised": ("only frozen weights can have 4 bits", "只有冻结的权重才能用 4 位"),
    "full-without-adapters": ("full training has no adapters", "全量训练没有适配器"),
    "four-bits-already": ("the weights have 4 bits already", "权重已经是 4 位"),
    "adapters-already": ("adapters are trained already", "已经在训练适配器"),
    "targets-named": ("the adapters' layers were named", "适配器所在的层已被指定"),
    "rank-lowest": ("no rank is lower than 1", "秩不能低于 1"),
    "only-for-adamw": (
        "it is for adamw, and the optimizer is {optimizer}",
        "它只适用于 adamw，而当前优化器是 {optimizer}",
    ),
    "precision-already": ("{precision} is computed in already", "已经用 {precision} 计算"),
    "pure-already": ("it is pure {precision} already", "已经是纯 {precision}"),
    # --- costly changes, and what each does to the result ---------------------------------------
    "together-with": (
        "{cost}, together with --allow {allowance}: {other}",
        "{cost}，并同时使用 --allow {allowance}：{other}",
    ),
    "cost-precision": ("computes in bf16 instead of fp32", "用 bf16 代替 fp32 计算"),
    "cost-pure": (
        "pure {precision}: updates below its precision are lost, since no fp32 weights are kept",
        "纯 {precision} 训练：不保留 fp32 主权重，小于其精度的更新会丢失",
    ),
    "cost-8bit": ("the optimizer's states have 8 bits instead of 32", "优化器状态由 32 位改为 8 位"),
    "cost-targets": (
        "adapters on the attention projections only, not on the MLPs",
        "适配器只加在注意力投影上，不加在 MLP 上",
    ),
    "cost-rank": ("adapters of rank {rank} instead of {before}", "适配器的秩由 {before} 降为 {rank}"),
    "cost-shorter": (
        "sequences are cut at {tokens} tokens instead of {before}",
        "序列在 {tokens} 个 token 处截断，而不是 {before}",
    ),
    "cost-quantize": (
        "the frozen weights have 4 bits (NF4) instead of 16",
        "冻结的权重由 16 位改为 4 位（NF4）",
    ),
    "cost-lora": (
        "trains adapters of rank {rank} instead of every weight",
        "只训练秩为 {rank} 的适配器，而不是全部权重",
    ),
    "cost-skip": ("samples longer than {tokens} tokens are left out", "丢弃长于 {tokens} 个 token 的样本"),
    "cost-model": ("trains {model} instead of {before}", "改为训练 {model}，而不是 {before}"),
    "effect-precision": ("fp32 weights are kept, so no update is lost", "保留 fp32 权重，不会丢失更新"),
    "effect-8bit": (
        "weights and updates keep their precision, and losses stay close to those of fp32 states",
        "权重和更新保持原有精度，损失与 fp32 状态接近",
    ),
    "effect-rank": (
        "the adapters can express less, which shows where there is much to learn",
        "适配器的表达能力降低，要学的内容多时才明显",
    ),
    "effect-quantize": (
        "the frozen weights are rounded, and the adapters learn to make up for it",
        "冻结的权重被舍入，由适配器在训练中弥补",
    ),
    "effect-targets": (
        "the MLPs stay as they are, and less is learned than with adapters everywhere",
        "MLP 保持不变，学到的少于处处加适配器",
    ),
    "effect-shorter": ("what stands behind the cut is never learned", "截断之后的内容学不到"),
    "effect-lora": ("only what adapters can express is learned", "只能学到适配器能表达的内容"),
    "effect-skip": ("the longest samples are never seen", "最长的样本不会被训练到"),
    "effect-pure": (
        "at the learning rates of a fine-tuning most updates are that small",
        "在微调的学习率下，大多数更新都小到会丢失",
    ),
    "effect-model": ("it is another model", "那是另一个模型"),
    # --- the next plan after memory ran out -----------------------------------------------------
    "ran-out-of-gpu": (
        "The last attempt ran out of GPU memory{place}{lacked}.",
        "上一次尝试{place}显存不足{lacked}。",
    ),
    "ran-out-of-host": (
        "The last attempt ran out of host RAM{place}{lacked}.",
        "上一次尝试{place}主机内存不足{lacked}。",
    ),
    "ran-out-of-locked": (
        "The last attempt ran out of host RAM that may be locked{place}{lacked}.",
        "上一次尝试{place}可锁定的主机内存不足{lacked}。",
    ),
    "was-missing": (": {size} GiB were missing", "，差 {size} GiB"),
    "no-piece": (
        "The last attempt found no {size} GiB in one piece of GPU memory{place}: it was there, but in smaller pieces.",
        "上一次尝试{place}找不到连续的 {size} GiB 显存：显存是够的，但都是更小的碎片。",
    ),
    "no-large-piece": (
        "The last attempt found no a piece large enough of GPU memory{place}: it was there, but in smaller pieces.",
        "上一次尝试{place}找不到足够大的连续显存：显存是够的，但都是更小的碎片。",
    ),
    "failed-init": (" while the model was set up", "在构建模型时"),
    "failed-forward": (" in the forward pass", "在前向传播时"),
    "failed-loss": (" at the loss", "在计算损失时"),
    "failed-backward": (" in the backward pass", "在反向传播时"),
    "failed-step": (" at the optimizer step", "在优化器更新时"),
    "failed-eval": (" in an evaluation", "在评估时"),
    "failed-save": (" while saving", "在保存时"),
    "predicts-less": (
        "The next plan predicts {less} GiB less {where} there: {after} instead of {before}{enough}.",
        "下一个方案预计{where}少用 {less} GiB：{after}，而不是 {before}{enough}。",
    ),
    "on-a-gpu": ("on a GPU", "每张 GPU "),
    "on-a-node": ("on a node", "每个节点"),
    "missing-and-margin": (
        "; at least what was missing and a margin of {margin} GiB was asked for",
        "；要求至少少用所缺的量再加 {margin} GiB 余量",
    ),
    "margin-alone": ("; at least {margin} GiB was asked for", "；要求至少少用 {margin} GiB"),
    "what-changes": ("What changes: {changes}.", "改动：{changes}。"),
    "as-fast": ("A step is predicted to take as long as before.", "预计每步时间与之前相同。"),
    "step-slower": ("A step is predicted to take {share:.0%} longer.", "预计每步慢 {share:.0%}。"),
    "step-faster": ("A step is predicted to take {share:.0%} less time.", "预计每步快 {share:.0%}。"),
    "not-locked": (
        "Host memory is not locked any more: copies to and from the GPUs are slower, which is not priced.",
        "不再使用锁页内存：与 GPU 之间的复制会变慢，这一点没有计入估计。",
    ),
    "faster-but-too-much": (
        "{way:capital} would be faster but predicts too much where memory ran out.",
        "{way:capital} 会更快，但在显存或内存耗尽之处预计占用太多。",
    ),
    "no-other-way": (
        "No other way to compute the same training predicts to use {size} GiB less there.",
        "要完成同样的训练，没有其他方案预计能再少用 {size} GiB。",
    ),
    "change-would-help": (
        "--allow {allowance} would help: {cost}; {effect} ({way}, {pace:,.0f} tokens/s).",
        "--allow {allowance} 会有帮助：{cost}；{effect}（{way}，{pace:,.0f} tokens/s）。",
    ),
    "no-change-helps": (
        "None of the changes that can be allowed would help, and no two of them together.",
        "可允许的改动中没有一个有帮助，任意两个组合也不行。",
    ),
    "without-pins": (
        "Without {names}, which {count:is|are} pinned, there would be one.",
        "如果不固定 {names}，就有可行的方案。",
    ),
    # --- time -----------------------------------------------------------------------------------
    "in-minutes": ("{count:# minute|# minutes}", "{count} 分钟"),
    "in-hours": ("{count:.1f} hours", "{count:.1f} 小时"),
    "in-days": ("{count:.1f} days", "{count:.1f} 天"),
    "cut-off": (
        "The timeout of {limit} cuts it off: all steps take about {time}, so about {share:.0%} of them are done when "
        "it stops.",
        "时限 {limit} 不够：全部步骤约需 {time}，停止时大约完成 {share:.0%}。",
    ),
    # --- what nobody here has run ---------------------------------------------------------------
    "unproven-nodes": (
        "Several nodes: these files were rendered and never run by us.",
        "多节点：这些文件由我们生成，但从未实际运行过。",
    ),
    "unproven-card": (
        "{card}: planned and rendered from documentation, never run by us.",
        "{card}：根据文档规划和生成，我们从未实际运行过。",
    ),
    "segments-fixed": (
        "PyTorch's memory segments cannot grow on this stack, so fragmentation may take more than is priced: "
        "--margin 10% leaves room for it.",
        "在这套软件栈上 PyTorch 的显存段不能扩展，碎片可能超出估计：--margin 10% 可以预留空间。",
    ),
    "unproven-nvme": (
        "NVMe offload on a GPU: our tests train with it on CPU ranks alone.",
        "GPU 上的 NVMe 卸载：我们的测试只在 CPU rank 上用它训练过。",
    ),
}

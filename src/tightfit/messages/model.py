"""What is said about models and their configs."""

from tightfit.messages import Texts

TEXTS: Texts = {
    "about": ("model {model}: {problem}", "模型 {model}：{problem}"),
    "did-you-mean": (" (did you mean {close!r}?)", "（是不是想写 {close!r}？）"),
    # --- which model ----------------------------------------------------------------------------
    "no-name": (
        "the model has no name: give a preset, a folder, a config.json or a Hugging Face id",
        "模型没有名称：请给出内置名称、目录、config.json 或 Hugging Face 模型 ID",
    ),
    "no-such-file": ("there is no file or folder {name}", "没有文件或目录 {name}"),
    "folder-is-an-adapter": (
        "the folder {path} holds a LoRA adapter: give the model that it adapts",
        "目录 {path} 里是 LoRA 适配器：请给出它所适配的模型",
    ),
    "folder-without-config": ("the folder {path} has no config.json", "目录 {path} 中没有 config.json"),
    "hub-no-id": (
        "{name} is no preset{nearby}, file, folder or Hugging Face id",
        "{name} 不是内置名称{nearby}、文件、目录或 Hugging Face 模型 ID",
    ),
    "hub-gated": (
        "{name} is gated: accept its licence on https://huggingface.co/{name} and log in with `hf auth login`, or give "
        "a preset{nearby} or a local config.json",
        "{name} 需要授权：请在 https://huggingface.co/{name} 接受许可并用 `hf auth login` 登录，或使用内置名称{nearby}"
        "或本地的 config.json",
    ),
    "hub-none": (
        "{name} is no preset{nearby}, file or folder, and Hugging Face has no such model that you may read",
        "{name} 不是内置名称{nearby}、文件或目录，Hugging Face 上也没有你可以读取的同名模型",
    ),
    "hub-offline": (
        "{name} is no preset{nearby}, file or folder, and it is not in the Hugging Face cache, which is all there is "
        "while HF_HUB_OFFLINE is set",
        "{name} 不是内置名称{nearby}、文件或目录，也不在 Hugging Face 缓存中，而设置 HF_HUB_OFFLINE 后只能用缓存",
    ),
    "hub-no-config": (
        "{name} on Hugging Face has no config.json, so it is no transformers model",
        "Hugging Face 上的 {name} 没有 config.json，因此不是 transformers 模型",
    ),
    "hub-unreachable": (
        "{name} is no preset{nearby}, file or folder, and Hugging Face could not be asked ({reason}): without a "
        "network, give a preset or a local config.json",
        "{name} 不是内置名称{nearby}、文件或目录，也无法访问 Hugging Face（{reason}）：没有网络时，请使用内置名称或"
        "本地的 config.json",
    ),
    "needs-huggingface-hub": (
        "{name} must be fetched from Hugging Face: pip install huggingface_hub",
        "{name} 需要从 Hugging Face 下载：pip install huggingface_hub",
    ),
    # --- how its config is read -----------------------------------------------------------------
    "config-not-json": ("the config of {name} is not JSON: {error}", "{name} 的配置不是 JSON：{error}"),
    "config-not-an-object": (
        "the config of {name} is not a JSON object but {config}",
        "{name} 的配置不是 JSON 对象，而是 {config}",
    ),
    "no-type": (
        "model {model}: the config has no model_type, which says how to read it",
        "模型 {model}：配置中没有 model_type，不知道该怎样读取",
    ),
    "mamba-ssm-format": (
        "model {model} is in mamba-ssm's own format without a model_type: take its Hugging Face twin, whose name ends "
        "in -hf",
        "模型 {model} 是 mamba-ssm 自己的格式，没有 model_type：请使用名称以 -hf 结尾的 Hugging Face 版本",
    ),
    "missing-key": (
        "the config has no {key}, which a {model_type} needs",
        "配置中没有 {key}，而 {model_type} 需要它",
    ),
    "no-text-config": (
        "the config has no text_config, where a gemma3 keeps its language model",
        "配置中没有 text_config，而 gemma3 的语言模型在其中",
    ),
    "not-a-number": ("{key} must be a number, not {value}", "{key} 应为数字，而不是 {value}"),
    "not-a-whole-number": ("{key} must be a whole number, not {value}", "{key} 应为整数，而不是 {value}"),
    "not-a-share": ("{key} must be a number from 0 to 1, not {value}", "{key} 应为 0 到 1 之间的数，而不是 {value}"),
    "not-a-switch": ("{key} must be true or false, not {value}", "{key} 应为 true 或 false，而不是 {value}"),
    "not-a-list": ("{key} must be a list, not {value}", "{key} 应为列表，而不是 {value}"),
    "not-an-object": ("{key} must be an object, not {value}", "{key} 应为对象，而不是 {value}"),
    "not-words": ("{key} must hold words, not {value}", "{key} 的各项应为文本，而不是 {value}"),
    "not-whole-numbers": ("{key} must hold whole numbers, not {value}", "{key} 的各项应为整数，而不是 {value}"),
    "not-positive": (
        "{key} is {value}, but must be above 0 and no more than {max_size}",
        "{key} 为 {value}，应大于 0 且不超过 {max_size}",
    ),
    "too-small": ("{key} is {value}, but must be at least {least}", "{key} 为 {value}，至少应为 {least}"),
    "too-large": ("{key} is {value}, but at most {most} is plausible", "{key} 为 {value}，合理的上限是 {most}"),
    "unknown-activation": (
        "{key} is {value}, which is no activation function of transformers{hint}",
        "{key} 为 {value}，不是 transformers 的激活函数{hint}",
    ),
    "entries-for-layers": (
        "{key} has {entries} entries for {layers} layers",
        "{key} 有 {entries} 项，而模型有 {layers} 层",
    ),
    "unknown-layer-type": (
        "layer_types holds {word!r}, but a {model_type} has {full} and {sliding} only",
        "layer_types 中有 {word!r}，但 {model_type} 只有 {full} 和 {sliding}",
    ),
    # --- sizes that do not go together ----------------------------------------------------------
    "not-a-multiple": (
        "{key} {size} is not a multiple of {other} {number}{given}",
        "{key} {size} 不是 {other} {number}{given}的整数倍",
    ),
    "default-kv": (" (transformers' default for {model_type})", "（transformers 对 {model_type} 的默认值）"),
    "heads-do-not-fill-width": (
        "num_heads {heads} × head_dim {head_dim} is not expand × hidden_size, which is {inner}",
        "num_heads {heads} × head_dim {head_dim} 不等于 expand × hidden_size（{inner}）",
    ),
    "implausible-width": (
        "expand × hidden_size is {expanded}, which is no plausible width",
        "expand × hidden_size 为 {expanded}，不是合理的宽度",
    ),
    "more-active-than-experts": (
        "num_experts_per_tok {top_k} is more than {experts_key} {experts}",
        "num_experts_per_tok {top_k} 大于 {experts_key} {experts}",
    ),
    "rotates-too-much": (
        "{key} is {fraction:g}, but a head cannot rotate more than all of itself",
        "{key} 为 {fraction:g}，但旋转的维度不能超过整个 head",
    ),
    "too-many-parameters": (
        "its sizes make {parameters:.3g} parameters, but at most {max_parameters:.0e} are plausible",
        "这些尺寸合计 {parameters:.3g} 个参数，合理的上限是 {max_parameters:.0e}",
    ),
    # --- blocks of shape fields -----------------------------------------------------------------
    "unreadable-fields": ("cannot read shape fields from {path}: {reason}", "无法从 {path} 读取形状字段：{reason}"),
    "no-shape-fields": (
        "{path} holds no block of shape fields such as family, d_model, n_layers",
        "{path} 中没有形状字段，例如 family、d_model、n_layers",
    ),
    "unknown-shape-field": (
        "model {name}: {key} is no shape field of a {model_type}{hint}",
        "模型 {name}：{key} 不是 {model_type} 的形状字段{hint}",
    ),
    "no-family": (
        "model {name}: the shape fields name no family, such as mamba or llama",
        "模型 {name}：形状字段没有指明系列，例如 mamba 或 llama",
    ),
    "key-given-twice": (
        "model {name}: {key} is given twice, also under another name",
        "模型 {name}：{key} 给了两次，还用了另一个名称",
    ),
    "bad-init-std": (
        "model {name}: {key} must be a number above 0 and up to 1, not {value}",
        "模型 {name}：{key} 应为大于 0 且不超过 1 的数，而不是 {value}",
    ),
    # --- models that are not known by name ------------------------------------------------------
    "not-by-name": (
        "{what} not known by name; `tightfit estimate --trace` measures it when the [train] extra is installed",
        "不认识{what}；安装 [train] 附加包后可用 `tightfit estimate --trace` 测量",
    ),
    "a-type": ("the model type {model_type}{hint} is", "模型类型 {model_type}{hint}"),
    "layers-that-differ": ("layers that differ by per_layer_config are", "各层由 per_layer_config 区分的模型"),
    "cross-attention": ("a gpt2 with add_cross_attention is", "带 add_cross_attention 的 gpt2"),
    "trace-needs-torch": (
        "model {name} is not known by name and tracing it needs torch and transformers: pip install 'tightfit[train]'",
        "不认识模型 {name}，追踪测量它需要 torch 和 transformers：pip install 'tightfit[train]'",
    ),
    "not-traced": ("model {name} cannot be traced: {said}", "无法追踪测量模型 {name}：{said}"),
    "trace-too-slow": ("tracing {name} took longer than {limit_s} s", "追踪测量 {name} 超过了 {limit_s} 秒"),
    "trace-not-started": (
        "tracing {name} could not start {python}: {reason}",
        "追踪测量 {name} 时无法启动 {python}：{reason}",
    ),
    "trace-failed": (
        "tracing {name} failed with exit code {returncode}: {last}",
        "追踪测量 {name} 失败，退出码 {returncode}：{last}",
    ),
}

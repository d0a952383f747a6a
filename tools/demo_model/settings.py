"""Sizes, seeds and step counts of the demo pair. Everything that shapes the result is here."""

import dataclasses

VOCABULARY = 4096
SPECIAL_TOKENS = 64  # the last ids of the vocabulary
GROUP_SIZE = 32  # weights per INT4 scale

# text_config of the target, in the names of Kimi K2.6's config.json.
TARGET = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 4096,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

# The drafter, in the names of z-lab's DFlash config.json.
DRAFTER = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 4096,
    "block_size": 8,
    "target_layer_ids": [0, 1, 2],  # never the last layer: its output serves the target's own head
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done in each stage. Step counts, not seconds, end the training."""

    # corpus
    corpus_characters: int = 240_000_000
    tokenizer_characters: int = 16_000_000
    shards: int = 64
    # target
    target_steps: int = 6400
    target_batch: int = 32  # rows per step
    target_row: int = 1024  # tokens per row
    target_long_row: int = 4096
    target_long_share: float = 0.15  # share of the steps, at the end, on long rows
    target_rate: float = 2e-3
    target_decay: float = 0.1
    logit_penalty: float = 1e-4  # on logsumexp**2
    residual_limit: float = 24.0  # |residual| beyond this costs
    residual_penalty: float = 1e-2
    compile: bool = True
    # rollouts for the drafter: (rows, tokens per row, share of the drafter's steps)
    rollouts: tuple = ((5120, 1024, 0.7), (1024, 2048, 0.3))
    rollout_limit: int = 200  # new tokens per prompt
    corpus_share: float = 0.3  # of the drafter's rows that are plain corpus
    # drafter
    drafter_steps: int = 3400
    drafter_batch_tokens: int = 16384
    drafter_anchors: int = 128  # per 1024 tokens
    drafter_rate: float = 1.5e-3
    drafter_decay: float = 0.01
    drafter_falloff: float = 4.0  # weight of block offset k is exp(-(k - 1) / falloff)
    # evaluation
    loss_documents: int = 4000
    eval_prompts: int = 40  # per category
    eval_tokens: int = 128  # new tokens per prompt
    eval_long_prompts: int = 5  # per category, behind `eval_long_context` tokens
    eval_long_context: int = 1900
    published_prompts: int = 10  # per category, in prompts.jsonl
    golden_prompts: int = 12
    golden_tokens: int = 64  # new tokens per golden prompt
    golden_gap: float = 0.05  # smallest gap of a golden prompt's best two logits, so that no kernel flips a token
    compared_tokens: int = 2000  # random tokens on which the logits are compared with transformers'


FULL = Plan()
SMOKE = Plan(corpus_characters=6_000_000, tokenizer_characters=2_000_000, shards=16, target_steps=60,
             rollouts=((256, 1024, 0.7), (64, 2048, 0.3)), drafter_steps=40, loss_documents=300, eval_prompts=3,
             eval_tokens=48, eval_long_prompts=1, published_prompts=2, golden_prompts=3, golden_gap=0.0)
# For a machine without a GPU: shows that every stage runs, and nothing else.
TOY = dataclasses.replace(SMOKE, corpus_characters=400_000, tokenizer_characters=400_000, shards=2, target_steps=3,
                          target_batch=2, target_row=96, target_long_row=128, compile=False,
                          rollouts=((4, 96, 0.7), (2, 128, 0.3)), rollout_limit=20, drafter_steps=4,
                          drafter_batch_tokens=128, loss_documents=8, eval_prompts=1, eval_tokens=10,
                          eval_long_context=100, published_prompts=1,
                          golden_tokens=6, golden_gap=0.0, compared_tokens=60)
PLANS = {"full": FULL, "smoke": SMOKE, "toy": TOY}

TEMPERATURES = (0.0, 0.8, 1.0)
CANDIDATES = 16  # drafter tokens per position that a tree may use
TREE_BUDGETS = (8, 16, 32)  # nodes below the root

"""What the checks of tokens, masks, log-probs and ratios teach (A1xx, A2xx)."""

from __future__ import annotations

TOKENS: dict[str, dict[str, str]] = {
    "A101": {
        "what": (
            "Tokens that the environment, a tool or the chat template wrote are under the loss. The policy gradient "
            "then raises or lowers the probability of text that the policy never chose."
        ),
        "why": (
            "Nothing crashes. The reward still rises for a while, because the answers are trained too; the policy "
            "also learns to write observations, entropy moves oddly, and a run that would be stable collapses after "
            "some hundred steps."
        ),
        "example": (
            "Ids `[prompt 5, answer 3, observation 8, answer 4]`: 7 tokens were sampled. A mask that covers "
            "everything behind the prompt trains 15, so more than half of the gradient is about observations."
        ),
        "by_hand": (
            "Decode one sample twice: `tokenizer.decode(ids[mask])` must read like the agent alone, "
            "`tokenizer.decode(ids[~mask])` like everybody else."
        ),
        "mend": (
            "TRL: return `env_mask` from `rollout_func` (1 for sampled tokens, 0 for tool output). verl: "
            "`response_mask` must be 0 on observations, and the actor must read it, not `attention_mask[:, "
            "-response_length:]`. SkyRL: 0 in `loss_masks` for observation tokens. verifiers: `mask` of a node is "
            "true where `sampled` is."
        ),
        "reported": (
            "Search-R1 PR#20 (stable for much longer after the fix); verl#1988, PR#2543; slime#1563; ms-swift#7835"
        ),
    },
    "A102": {
        "what": (
            "The policy sampled tokens in these samples, and none of them is trained on, though no limit and no error"
            " is recorded that would explain it."
        ),
        "why": (
            "The batch is smaller than the log says, and mean rewards include episodes that taught nothing. If the "
            "lost samples are not random (the longest, or the failures), what is learnt is biased."
        ),
        "example": (
            "64 rollouts, of which 9 have mask 0 throughout: the step trains on 55, the denominator may still say 64."
        ),
        "by_hand": (
            "`(mask.sum(1) == 0) & (sampled.sum(1) > 0)`: look at stop reason, length and reward of those rows."
        ),
        "mend": (
            "TRL: `mask_truncated_completions` does this on purpose: record why generation stopped. verl and SkyRL: "
            "look for a mask that was cut at the maximal response length, and for overlong filtering "
            "(`apply_overlong_filtering` in SkyRL)."
        ),
    },
    "A103": {
        "what": "Some sampled tokens of an answer have no loss while others of the same answer have.",
        "why": (
            "An answer is one decision; a hole in it credits the rest for what the hole did. If the hole is always "
            "the end token, the agent is never told when to stop: lengths grow until the limit cuts them."
        ),
        "example": (
            "Answer `<think> go left </think> left <end>`, mask `1 1 1 1 1 0`: no gradient ever touches `<end>`."
        ),
        "by_hand": (
            "For each run of `sampled`, compare `mask[run].sum()` with `len(run)`; print the position of the first 0."
        ),
        "mend": (
            "Build the mask from the ids that the engine returned, never by searching strings for the answer. verl, "
            "SkyRL: append the engine's `token_ids` with ones, then the observation with zeros. A token that code "
            "forced is not sampled: say so."
        ),
        "reported": "verl PR#3287 (off by one)",
    },
    "A104": {
        "what": ("In an episode that is stored as one sample, whole answers have no loss: often all but the last one."),
        "why": (
            "The early turns, where the task is won or lost, are never trained. The curve looks like a hard task: "
            "slow, and flat from a level that the last turn alone can reach."
        ),
        "example": (
            "5 answers of 20 tokens, 20 trained tokens in the mask: four fifths of the policy's decisions get no "
            "gradient."
        ),
        "by_hand": "Count runs of `sampled` and runs of `mask` per sample: they must be equal.",
        "mend": (
            "Chat templates that return an assistant mask need the generation markers around every assistant message,"
            " not around the last. ms-swift and verl: check that the multi-turn mask is the union over turns. If "
            "turns are samples of their own, give them one rollout id."
        ),
        "reported": "ms-swift#7835 (only the last turn trained)",
    },
    "A105": {
        "what": (
            "An end token that code appended (the engine stopped before it, or a limit cut the answer) is under the "
            "loss. It was not sampled, so it has no log-prob of the sampler, or a made-up one."
        ),
        "why": (
            "With a made-up log-prob of 0 the ratio at that token is the probability itself. A policy that hardly "
            "ever ends there gives log-probs of -15 and worse, the gradient explodes, and the loss turns NaN some "
            "steps later, far from the cause."
        ),
        "example": (
            "The answer was cut at 512 tokens; code adds `<end>` with log-prob 0. The trainer says -14.2: the ratio "
            "is exp(-14.2) = 7e-7 with a negative advantage, or the KL of this one token is 14.2."
        ),
        "by_hand": (
            "Last trained token of each answer: is it in the engine's `token_ids`? What is the trainer's log-prob of "
            "it?"
        ),
        "mend": (
            "Mask it. SkyRL: `append_eos_token_after_stop_str_in_multi_turn` appends one with loss mask 0; keep that "
            "0. verl: agent loops return `response_mask`, set it to 0 for what you add. Better: stop on the end token"
            " and let the policy sample it."
        ),
        "reported": "Agent-R1#30; verl#891",
    },
    "A106": {
        "what": "A column that must have one value per token has more or fewer than there are ids.",
        "why": (
            "Numpy and torch broadcast or cut without a word; from the first missing token on, each log-prob and each"
            " mask belongs to its neighbour. The run trains, badly."
        ),
        "example": (
            "41 ids, 40 log-probs: the first id has none. Aligned at the left, every ratio is that of the token before."
        ),
        "by_hand": "`len(ids) == len(mask) == len(logprobs)` for every row, before any padding.",
        "mend": (
            "Choose one convention and assert it where rows are made: a value per token of the whole sequence, or a "
            "value per response token. Engines return log-probs of the response only; the prompt's must be filled "
            "with NaN, not left out."
        ),
        "reported": "verl PR#3287 (off by one)",
    },
    "A107": {
        "what": (
            "The answer of a turn stands in the next turn's context as text, and its ids differ from those that were "
            "sampled: it was decoded and encoded again."
        ),
        "why": (
            'Tokenizers do not invert: `" ab"` may be sampled as `[" a", "b"]` and come back as `[" ab"]`. What is '
            "trained has another probability than what was sampled, most of all where answers are unusual, so drift "
            "grows as the policy explores."
        ),
        "example": (
            "Sampled `[220, 17]`, re-encoded `[301]`: the sampler said -0.3 and -0.2, the trainer says -6.1 for a "
            "token that nobody sampled. A few such tokens per thousand are enough to move the mean ratio."
        ),
        "by_hand": (
            "`encode(decode(ids)) == ids` over 1,000 sampled answers; or search the ids of turn t in those of turn t "
            "+ 1."
        ),
        "mend": (
            "Pass token ids between turns. vLLM: `return_token_ids=true`, prompts as ids. verl: token-in token-out "
            "agent loops, not the chat completion server. SkyRL: its generator keeps ids unless a custom chat "
            "template makes it encode again. verifiers: train on `token_ids` of the nodes."
        ),
        "reported": ("trl#5224, #5240, PR#6250; verl's multi-turn documentation (PPO did not converge); miles PR#353"),
    },
    "A108": {
        "what": "Tokens whose attention mask is 0, that is padding, are under the loss.",
        "why": (
            "The policy is trained to write padding behind its answers, and padding fills the denominator: the more "
            "ragged a batch, the smaller the gradient of its real tokens."
        ),
        "example": (
            "Two answers of 10 and 90 tokens padded to 90: 80 of the 180 counted tokens are padding, the gradient "
            "falls by 44 %."
        ),
        "by_hand": (
            "`(loss_mask & (attention_mask == 0)).sum()` must be 0. Beware of pad id = end id: go by position, not by"
            " id."
        ),
        "mend": "Multiply the loss mask by the attention mask; never derive a mask from `ids != pad_id`.",
        "reported": "verl#1988, #1989 (loss mask against response mask)",
    },
    "A109": {
        "what": "A sample holds no token that the policy sampled.",
        "why": (
            "Means over it are 0 / 0. Frameworks crash, drop it silently (and the group has one member fewer), or "
            "count it in the denominator, which shrinks the gradient of all others."
        ),
        "example": (
            "A prompt that fills the context leaves room for 0 tokens: reward 0, and a mean over an empty answer."
        ),
        "by_hand": "`(mask.sum(1) == 0).nonzero()`, and the lengths of those prompts.",
        "mend": (
            "Filter long prompts before sampling (verl: `filter_overlong_prompts`). An episode without sampled tokens"
            " may count in the group's statistic; it must not enter the loss or its denominator."
        ),
        "reported": "agent-lightning#74, #76, #442, #586",
    },
    "A110": {
        "what": (
            "Many samples have exactly the largest length of the file and no end: a limit cut them, and the file does"
            " not say so."
        ),
        "why": (
            "What was cut is scored as if the agent had stopped there. It fails, so long reasoning is punished; "
            "answers shorten, and the run reads like a discovery about brevity."
        ),
        "example": (
            "Lengths 212, 347, 4096, 4096, 95, 4096: three of six ended at the limit; their rewards are all 0."
        ),
        "by_hand": "`np.unique(lengths, return_counts=True)`: is there a pile at the end?",
        "mend": (
            "Record the engine's stop reason with each sample. TRL: `mask_truncated_completions`. verl: overlong "
            "reward shaping, or a larger `response_length`. SkyRL: `apply_overlong_filtering`. Or treat the cut as "
            "what it is and bootstrap."
        ),
        "reported": "DAPO, arXiv 2503.14476 (overlong filtering)",
    },
    "A201": {
        "what": "A log-probability above 0 would be a probability above 1.",
        "why": (
            "Where the column holds something else, every ratio and every KL estimate is nonsense that looks like "
            "numbers."
        ),
        "example": (
            "0.83 under `logprobs`: a probability. exp(-0.4 - 0.83) = 0.29 as a ratio, when both really are -0.19 and"
            " -0.4."
        ),
        "by_hand": "`logprobs.max() <= 0`, up to rounding of about 1e-3 in bf16.",
        "mend": (
            "Find out whether these are probabilities, negated losses (`-log p`), or ratios; store "
            "`log_softmax(logits)[id]`."
        ),
        "reported": "vllm#42259 (what a returned log-prob means differs between engines and modes)",
    },
    "A202": {
        "what": "Tokens that the policy sampled and that are trained have no log-prob of the sampler.",
        "why": (
            "Filled with 0 they give ratios equal to probabilities; filled with the trainer's they hide the mismatch "
            "that the ratio is there to correct; left NaN they are the end of the run."
        ),
        "example": (
            "Log-probs `-0.2, NaN, -1.1`: with NaN as 0 the second ratio of a token of probability .05 is .05 instead"
            " of 1."
        ),
        "by_hand": "`np.isnan(logprobs[mask]).sum()` per sample; print id and position.",
        "mend": (
            "Ask the engine for the log-prob of each sampled token (vLLM: `logprobs=0` or 1; verl: "
            "`rollout.calculate_log_probs=True`). Take the old log-prob from a score pass where the sampler cannot "
            "know it (composed or forced answers)."
        ),
        "reported": "verl#891; Agent-R1#30",
    },
    "A203": {
        "what": (
            "The log-probs of whole samples are exactly 0, or exactly one other number: the column was never filled in."
        ),
        "why": (
            "A ratio against 0 is at most 1, mostly far below the clip: the clipped objective passes the gradient of "
            "bad actions and stops that of good ones. Loss curves look calm."
        ),
        "example": (
            "Trainer -2.3, sampler 0 (placeholder): ratio 0.1, clipped at 0.8 for negative advantages: no gradient at"
            " all."
        ),
        "by_hand": (
            "`logprobs[mask].std()` per sample. Greedy decoding and a collapsed policy really have 0, an untrained one "
            "-log(vocabulary); but who is sure gives one context one answer."
        ),
        "mend": ("Pass the engine's log-probs through every layer, or drop the column and score before the update."),
    },
    "A204": {
        "what": "The recorded log-probs are not those that the given model assigns to these ids.",
        "why": (
            "Either the file is of other weights, another temperature, another template; or the engine computes "
            "something else than the trainer. Each makes every ratio wrong from the first step, even at learning rate"
            " 0."
        ),
        "example": ("Mean difference 0.01 nats: bf16. 0.3: another temperature. 3: another model, or one token off."),
        "by_hand": (
            "One forward of one sample: `log_softmax(logits[:-1] / temperature).gather(ids[1:])` beside the recorded "
            "numbers."
        ),
        "mend": (
            "Check in this order: one token off; temperature applied on both sides; special tokens and padding side; "
            "LoRA adapter loaded in the engine; precision. Same weights and kernels must agree to 1e-5."
        ),
        "reported": "open-instruct#1473 (drift at learning rate 0); vllm#48305",
    },
    "A205": {
        "what": (
            "The mean of `exp(trainer log-prob - sampler log-prob)` over sampled tokens is not 1. For samples of q "
            "the mean of p / q is the mass of p on what q can sample: 1, unless q is cut off or the log-probs are of "
            "another distribution."
        ),
        "why": (
            "Top-p, top-k or min-p cut the distribution and engines log it renormalised. Each ratio is too small by "
            "the kept mass, so every gradient is scaled down and half of the tokens may lie outside a tight clip "
            "before any update has happened."
        ),
        "example": (
            "p = (.6, .3, .1) with top-p .9 keeps (.6, .3) and logs (.667, .333). The ratios are .9 and .9: the mean "
            "ratio is the kept mass, .9. Measured with top-p 0.8 in one report: kept mass .895, mean ratio .896."
        ),
        "by_hand": (
            "`np.exp(trainer - sampler)[mask].mean()`; healthy engines give 1 within 0.002 over 10,000 tokens."
        ),
        "mend": (
            "TRL: `top_p=1.0, top_k=0, min_p=None`; verl: `rollout.top_p=1.0, rollout.top_k=-1`; SkyRL: "
            "`sampling_params.top_p=1.0`. Look into the checkpoint's generation_config.json, from which engines take "
            "defaults. Or renormalise the trainer over the same kept tokens."
        ),
        "reported": "trl#6789, PR#7269 (kept mass 0.895, mean ratio 0.896); prime-rl PR#2601, #2979, #3235",
    },
    "A206": {
        "what": (
            "The file says that its sampler used top-p below 1 or a top-k, and holds no pair of log-probs to show the"
            " effect."
        ),
        "why": (
            "See A205: the gradient is not that of the policy that is trained, and tokens outside the kept set are "
            "never corrected."
        ),
        "example": "top_p 0.95: 5 % of each position's mass is never sampled, and the ratio's mean is about .95.",
        "by_hand": "Record sampler and trainer log-probs for one batch and take the mean ratio.",
        "mend": "Sample the whole distribution while training; keep top-p for evaluation.",
        "reported": "trl#6789; prime-rl PR#2601",
    },
    "A207": {
        "what": "Trainer and sampler log-probs of what should be the same tokens do not go together.",
        "why": (
            "Ratios of unrelated tokens are noise of a factor of ten; the clip hides it, and what is left of the "
            "gradient is random."
        ),
        "example": "Sampler `-0.1, -3.0, -0.2`, trainer `-3.0, -0.2, -1.4`: moved by one token they agree.",
        "by_hand": ("`np.corrcoef(sampler[mask], trainer[mask])[0, 1]` should be above .95; try both shifts by one."),
        "mend": (
            "Logits at position t predict token t + 1: shift once. Else the rows were reordered (length sorting, "
            "balancing between workers) without the log-probs."
        ),
        "reported": "verl PR#3287 (off by one)",
    },
    "A208": {
        "what": "Weights of several versions sampled the episodes of one group, or the turns of one episode.",
        "why": (
            "Asynchronous training does this on purpose. The group's baseline then mixes policies, and the ratio must"
            " be taken against the version that sampled each token, not against the last one."
        ),
        "example": (
            "A group with versions 7, 7, 7 and 4: the fourth was started three updates earlier and finished late."
        ),
        "by_hand": "Count versions per group.",
        "mend": "Keep the sampler's own log-probs as denominator, bound the staleness, or drop what is older.",
        "reported": "TRL PR#7017, #6007 (adapter not refreshed in the sampler)",
    },
    "A209": {
        "what": ("Sampler and trainer give the same tokens noticeably different log-probs, around a mean ratio of 1."),
        "why": (
            "Off-policy before the first update: clips act on noise, and long answers, whose ratios multiply, are hit"
            " most. It grows with training and often ends in collapse."
        ),
        "example": (
            "0.01 to 0.02 nats a token is bf16 between two engines; 0.1 over 1,000 tokens is a sequence ratio of "
            "anything."
        ),
        "by_hand": "`np.abs(trainer - sampler)[mask].mean()` every step, as a curve.",
        "mend": (
            "Same precision and attention kernel on both sides, fp32 in the last layer, weights synchronised. TRL: "
            "`vllm_importance_sampling_correction`; verl: rollout correction; SkyRL: truncated importance sampling."
        ),
        "reported": "AReaL#1290; verl#2996, #6280, #6240, PR#2953; NeMo-RL#4039; vime#64",
    },
}

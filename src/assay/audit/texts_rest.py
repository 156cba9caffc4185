"""What the checks of rewards, outcomes, prompts, tasks, numbers and weights teach (A4xx to A6xx)."""

from __future__ import annotations

REST: dict[str, dict[str, str]] = {
    "A401": {
        "what": (
            "Episodes that ended in an error of the environment, a tool or the engine have reward 0 and are trained "
            "on. With an error or an outcome on record this is certain; if only the text says so it is likely."
        ),
        "why": (
            "The policy is taught to avoid what it did just before the server went down. Errors cluster (one bad "
            "node, one hour), so whole groups fail together or, worse, one member does and the others look good."
        ),
        "example": ("Rewards 1, 1, 1 and a time-out as 0: the three get +.5, the fourth -1.5 for a correct action."),
        "by_hand": (
            "Search tool messages for 'Error executing tool', 'timed out', 'Connection refused'; compare the reward "
            "of those episodes."
        ),
        "mend": (
            "verl: a tool exception becomes the text 'Error executing tool' with reward 0.0: raise it to the agent "
            "loop and drop or resample the rollout. verifiers: read `errors` of the trace. TRL: a reward of None "
            "leaves the rollout out. SkyRL: mask the trajectory. A crash is not a reward: here it is outcome "
            "`environment error`, reward NaN, counted, and out of loss and statistic."
        ),
        "reported": "NeMo-RL PR#2207; NeMo-Gym#1351; agent-lightning#448; UniRL PR#214",
    },
    "A402": {
        "what": (
            "An episode ended because a token or context limit cut it; it has reward 0 and nothing says that it was "
            "cut."
        ),
        "why": (
            "Being cut is not failing. Punished as failure, long but good reasoning is unlearnt, and the effect of "
            "the limit looks like the method's."
        ),
        "example": (
            "25 % of the answers are cut at 4,096 tokens: their mean advantage is -.6, and the mean length falls from"
            " step to step."
        ),
        "by_hand": "Mean reward by stop reason; share of stop = length over the steps.",
        "mend": (
            "TRL: `mask_truncated_completions=True`. SkyRL: `apply_overlong_filtering`, or `zero_reward_on_non_stop` "
            "if it is meant. verl: overlong buffer of DAPO. With a critic: bootstrap from the last value. Here a cut "
            "is an outcome of its own, and key `cut` decides what it does."
        ),
        "reported": "DAPO, arXiv 2503.14476, section 3.4; Time limits in RL, arXiv 1712.00378",
    },
    "A403": {
        "what": "All episodes have the same reward.",
        "why": (
            "No comparison, no gradient. Nearly always the parser does not find the answer, and the first days go "
            "into hyperparameters."
        ),
        "example": "The verifier expects `\\boxed{}`, the prompt asks for `<answer>`: 0 for everyone.",
        "by_hand": (
            "Score the gold answer (must be 1), an empty one (must be 0), and one sampled answer while reading it."
        ),
        "mend": "Mend parser or prompt format; start from a policy that solves some tasks; use easier tasks.",
        "reported": "trl#3452; open-r1#255, #436, #474; ms-swift#4789",
    },
    "A404": {
        "what": "Within (nearly) every group all rollouts have the same reward.",
        "why": (
            "A group estimator learns from groups that differ. If none does, the step is noise from the KL or the "
            "entropy term alone."
        ),
        "example": (
            "8 groups of 8, three all solved and five all failed: mean reward .375 looks fine, the gradient is 0."
        ),
        "by_hand": "Share of groups with `np.ptp(reward) == 0`, as a curve.",
        "mend": (
            "More rollouts a task, tasks of middle difficulty, dynamic sampling (verl: `filter_groups`). If it is "
            "every group, look whether rewards were written per task instead of per rollout."
        ),
        "reported": (
            "DAPO, arXiv 2503.14476; trl#3857; ms-swift#4570; CoursIA#10603 (group size 2 wastes 70 % of the groups)"
        ),
    },
    "A405": {
        "what": "Rewards lie outside the range that was declared.",
        "why": (
            "A bonus counted twice or a penalty per token that was meant per episode dominates the outcome; the "
            "policy optimises the bonus."
        ),
        "example": "Outcome 0 or 1, found 1.2: a format bonus of .2 is added on top.",
        "by_hand": "Histogram of the reward; each part of it in a column of its own.",
        "mend": (
            "Log the parts apart. TRL: `reward_weights`; verifiers: rubric weights; verl: return a dict with `score`."
        ),
    },
    "A406": {
        "what": (
            "The reward is not known (missing, or the episode crashed) and the sample has an advantage other than 0."
        ),
        "why": "Somewhere 'not known' became a number. It moved the group mean, too.",
        "example": (
            "Rewards 1, None, 0, 1: with None as 0 the mean is .5 instead of .67, and the missing one is pushed down."
        ),
        "by_hand": "`advantages[np.isnan(reward)]` must be NaN or 0.",
        "mend": "`np.nanmean` over the known ones, and leave the others out of the loss. TRL does so for None.",
        "reported": "trl#5775, PR#5902 (a reward of None became 0); UniRL PR#214",
    },
    "A407": {
        "what": "Episodes are called a success and have a reward of 0 or less, below that of a failure.",
        "why": (
            "Success rate and reward then tell two stories; the paper reports one, the gradient follows the other."
        ),
        "example": (
            "outcome success with reward 0: the success flag was read one step late, after the environment had reset "
            "itself."
        ),
        "by_hand": "Mean reward by outcome.",
        "mend": (
            "Take both from the same step. Vector environments that reset on their own return the next episode's "
            "state: read the final info."
        ),
    },
    "A501": {
        "what": "The gold answer, or a string that was declared as a hint, stands in the prompt.",
        "why": (
            "Evaluation measures copying. In training the policy learns to look for the leak, and fails without it."
        ),
        "example": ("`extra_info` is rendered into the prompt by a template that prints every column: `answer: 42`."),
        "by_hand": (
            "`gold in prompt`, as a word, over the evaluation set; read one rendered prompt from first to last token."
        ),
        "mend": (
            "Render named fields only. Keep hinted prompts to training and evaluate under the plain one. Reading "
            "tasks contain the answer by design."
        ),
    },
    "A502": {
        "what": "Tasks (by content, where the key tells it) or prompts are both in training and in evaluation.",
        "why": "What is measured is partly memory. Splits by seed are no guarantee: small tasks repeat.",
        "example": (
            "BabyAI GoToRedBallNoDists: of 1,000 fresh seeds, 66 % are layouts that the first 5,000 seeds had already."
        ),
        "by_hand": "Hash the rendered first observation and goal; intersect the sets.",
        "mend": "Split by content hash. Build the evaluation panel first and take it out of training.",
        "reported": "measured on MiniGrid; ZJU-REAL/Agent-G2#1 (repeated validation tasks)",
    },
    "A503": {
        "what": (
            "The context of a turn does not begin with the turn before it, answer included. So no prefix can be "
            "shared, and each turn becomes a training sample of its own."
        ),
        "why": (
            "Chat templates of reasoning models drop the reasoning of past turns. Eight rollouts then are 64 samples,"
            " with the compute of 64; means over samples weigh long episodes more; and the policy never sees the "
            "history that it wrote."
        ),
        "example": (
            "8 rollouts of 8 turns: 64 samples and 1,825,684 tokens in one report, where 8 sequences would have done."
        ),
        "by_hand": (
            "`ids[t + 1][: len(ids[t])] == ids[t]` for neighbouring turns; count the first place where it is not."
        ),
        "mend": (
            "Use a template with the prefix property (one that keeps reasoning), or tokens instead of messages "
            "between turns. TRL, prime-rl and verl offer patched templates. Here ids are spliced, always. If it is "
            "meant (a sliding window, compaction), declare the layout and count episodes, not samples."
        ),
        "reported": ("slime#2288 (8 rollouts, 64 samples); verl#6854; prime-rl#1334; ART#726; tinker-cookbook PR#142"),
    },
    "A504": {
        "what": (
            "Sequences begin with the same token twice, as when the template writes the start token and the tokenizer"
            " adds its own."
        ),
        "why": (
            "Models saw one start token in training; with two, log-probs shift a little everywhere. Sampler and "
            "trainer may differ in it."
        ),
        "example": "`<bos><bos>system ...`: vLLM adds one to text prompts, and none to prompts given as ids.",
        "by_hand": "`ids[:2]` of a few samples, and what the tokenizer calls them.",
        "mend": ("`tokenizer(text, add_special_tokens=False)` behind `apply_chat_template`; pass ids to the engine."),
        "reported": "transformers documentation, chat templates",
    },
    "A601": {
        "what": "NaN on trained tokens, or infinities anywhere.",
        "why": (
            "One NaN in a batch makes the loss, then all weights NaN. Clipping of the gradient norm does not help: "
            "NaN is not above a bound."
        ),
        "example": "`torch.std` of a group of one is NaN: so is the advantage of that rollout, and the update.",
        "by_hand": "`np.isfinite(column[mask]).all()` before every update.",
        "mend": (
            "Find the 0 / 0: a std of one member, a mean over an empty answer, a log of 0 where a token was masked "
            "out of the logits."
        ),
        "reported": "Agent-R1#30; verl#891",
    },
    "A602": {
        "what": "Ids are negative or not below the vocabulary.",
        "why": (
            "On a GPU an index outside the embedding is an assertion far from its cause, or silent garbage; -100 "
            "wraps to a real row."
        ),
        "example": "-100 in `input_ids`: a label that says 'ignore' got into the inputs.",
        "by_hand": "`0 <= ids.min() and ids.max() < config.vocab_size`.",
        "mend": (
            "Keep labels and inputs apart; load the tokenizer that belongs to the checkpoint; resize the embedding "
            "after adding tokens."
        ),
    },
    "A603": {
        "what": "The weight of a token depends on the width to which its batch was padded.",
        "why": (
            "A mean over a padded tensor divides by padding. An answer beside a long one then counts less than the "
            "same answer beside short ones; sorting by length, micro-batch size and the number of GPUs all change the"
            " training."
        ),
        "example": (
            "10 trained tokens, padded to 100 and to 400: weights 1/100 and 1/400, a factor of four for the same "
            "answer."
        ),
        "by_hand": ("Train one step with micro-batches of 1 and of 8: loss and gradient norm must agree to rounding."),
        "mend": (
            "Sum, then divide once by the trained tokens (or episodes) of the whole optimiser step. verl: "
            "`loss_agg_mode=token-mean`; with `seq-mean-token-sum-norm` set `loss_scale_factor`, which is the padded "
            'width by default; TRL: `loss_type="dapo"` or "dr_grpo"; SkyRL: `loss_reduction`.'
        ),
        "reported": "verl#3741, PR#4360, PR#5417 (divisor `loss_mask.shape[-1]`); verl#1136",
    },
    "A604": {
        "what": (
            "Token weights do not follow the declared denominator: token (all tokens alike), sequence (samples), "
            "episode, constant."
        ),
        "why": (
            "The denominator decides whether long episodes count more. A mean of micro-batch means is none of the four."
        ),
        "example": (
            "Two micro-batches with 100 and 300 tokens, each averaged: tokens of the first weigh three times as much."
        ),
        "by_hand": "Sum the weights per token, sample and episode: one of the three sums must be equal for all.",
        "mend": (
            "Count over the whole optimiser step before the first backward. SkyRL step-wise: divide by trajectories, "
            "not by step samples."
        ),
        "reported": "agent-lightning PR#445; SkyRL PR#1529, #1278, #201; verifiers PR#536",
    },
    "A605": {
        "what": (
            "A few episodes hold several times their share of the gradient (|weight x advantage|, or trained tokens "
            "where that is all there is)."
        ),
        "why": (
            "With a token mean, an episode of 40 turns counts ten times one of 4. Often it is a failure that wanders,"
            " so failing long is what is learnt about."
        ),
        "example": "Ten episodes, nine of 50 tokens and one of 900: the one is 67 % of the loss.",
        "by_hand": "`np.bincount(episode, mask.sum(1))`, sorted.",
        "mend": ("Mean over episodes of token means, or a constant denominator (Dr.GRPO); or accept it, knowingly."),
        "reported": "agent-lightning PR#445; verifiers PR#536; Dr.GRPO, arXiv 2503.20783",
    },
}

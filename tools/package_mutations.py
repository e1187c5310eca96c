"""Ways to break the package outside of the scheduler, each of which the named tests must notice. Run by ``mutate.py``.

A mutation replaces `old`, which occurs exactly once in the file, by `new`; some test of `test_file` that pytest's
``-k`` picks by `tests` must fail then. The tests have to be quick, and must not wait for ever: every mutation starts a
pytest of its own. A new area gets a list of its own below, and a place in `PACKAGE_MUTATIONS`.
"""

from __future__ import annotations

from typing import NamedTuple


class PackageMutation(NamedTuple):
    file: str  # in hf_paged/
    old: str
    new: str
    test_file: str  # in tests/
    tests: str


GENERATE, INPUTS, LOCKSTEP = (f"integration/{name}.py" for name in ("generate", "inputs", "stock_loop"))
ENABLE_TESTS = "integration/test_enable.py"
PATHS, EXPLAIN, HOOKS = (f"integration/{name}.py" for name in ("paths", "explain", "hooks"))
PATHS_TESTS, WARNING_TESTS, EXPLAIN_TESTS = (
    f"integration/test_{name}.py" for name in ("paths", "fallback", "explain")
)
PIECES, FALLBACK, CACHE = (f"integration/{name}.py" for name in ("stock_pieces", "fallback", "paged_cache"))
GIVEN, LATE = (f"integration/{name}.py" for name in ("given_options", "late_cache"))
GIVEN_TESTS, LATE_TESTS = "integration/test_given_options.py", "integration/test_late_cache.py"
BATCHING = "integration/continuous_batching"
BOARD, REQUESTS_FILE = (f"{BATCHING}/{name}.py" for name in ("board", "requests"))
OPTIONS_TESTS = "integration/test_generate_options.py"
FALLBACK_TESTS = "integration/test_generate_fallbacks.py"
LOCKSTEP_TESTS = "integration/test_stock_loop.py"
BATCH, BATCH_TESTS, LOOP = "engine/lockstep.py", "engine/test_lockstep.py", "engine/loop.py"
STATE, PREPARED = "engine/engine_state.py", "engine/prepared_model.py"
FACTS, FACTS_TESTS = "guards/snapshot.py", "guards/test_snapshot.py"
GRAPHS_TESTS, PADDED = "runner/test_graphs.py", "runner/padded_steps.py"
VIRTUAL, VIRTUAL_TESTS = "device/virtual_memory.py", "device/test_virtual_memory.py"
POOL_TESTS = "runner/test_kv_cache.py"
PATCHED_TESTS = "guards/test_original_code.py"
OWN_CODE, AT_HOME = (f"guards/{name}.py" for name in ("original_code", "origin"))
INNER_TESTS, TOKENWISE_TESTS = "guards/test_inner_tensors.py", "models/test_tokenwise.py"
BATCHING_TESTS = "integration/continuous_batching/test_methods.py"
GENERIC_TESTS, ELIGIBILITY_TESTS = "models/test_generic.py", "models/test_generic_eligibility.py"
KERNELS, KERNEL_TESTS = "guards/hub_kernels.py", "guards/test_hub_kernels.py"
WRAPPER_TESTS = "models/test_wrappers.py"

PLACE, PLACE_TESTS = "parallel/checkpoint_place.py", "parallel/test_checkpoint_place.py"
IN_UPDATE_TESTS = "engine/test_calls_in_updates.py"
CHATS, PARTS_TESTS = "options/chats.py", "options/test_chats.py"
CHAT_KEYWORDS, CHAT_TESTS = "options/chat_keywords.py", "options/test_chat_keywords.py"
# Messages about what is missing or written otherwise.
MESSAGES = [
    PackageMutation("serve.py", '        require("serve", f"{program} serve")', "        pass", "test_optional.py",
                    "ends_with_one_line"),
    PackageMutation("serve.py", "        PagedConfig(**settings)", "        pass", "test_serve.py", "end_the_command"),
    PackageMutation("vllm_names.py", "if name not in accepted and (near", "if (near", "test_vllm_names.py",
                    "answered_together"),
    PackageMutation("vllm_names.py", "    for table in (SAMPLING, LOADING):\n", "    for table in ():\n",
                    "test_vllm_names.py", "other_names_in_a_config"),
    PackageMutation("integration/pretrained.py", "found[1] not in arguments", "False", "test_vllm_names.py",
                    "of_the_models_own"),
    PackageMutation(CHAT_KEYWORDS, "    check_read(template, tokenizer)\n", "", CHAT_TESTS, "refused_by_name"),
    PackageMutation(CHAT_KEYWORDS, "{**(others or {}), **given}", "{}", CHAT_TESTS, "will_be_used"),
    PackageMutation(CHAT_KEYWORDS, "value is not None and name not in read", "name not in read", CHAT_TESTS,
                    "asks_for_nothing"),
    PackageMutation(CHATS, 'if message["role"] in _ROLES else None', "", PARTS_TESTS, "as_stock_does"),
    PackageMutation(CHATS, "rendered.count(form) > without.count(form)", "True", PARTS_TESTS, "quotes_a_list"),
    PackageMutation(CHATS, "for n in range(len(groups) + 1)", "for n in (0, len(groups))", PARTS_TESTS,
                    "no_more_roles"),
    PackageMutation("options/argument_warnings.py", 'or "room" in self._given', "", "integration/test_requests.py",
                    "beyond_the_longest"),
    PackageMutation("options/arguments.py", "            GenerationConfig(**{name: value}).validate()\n",
                    "            pass\n", "options/test_arguments.py", "length_as_text"),
    PackageMutation("engine/engine.py", "self._update is not None and self._update in _updates.get()",
                    "False", IN_UPDATE_TESTS, "awaited"),
    PackageMutation(INPUTS, "    if engine.is_updating():\n", "    if False:\n", IN_UPDATE_TESTS, "stock"),
    PackageMutation(PLACE, "or _is_too_deep(path)", "", PLACE_TESTS, "missing_folder"),
    PackageMutation(PLACE, """path.partition("@")[0].count""", "path.count", PLACE_TESTS, "may_have_slashes"),
    PackageMutation(PLACE, "error.errno is not None", "False", PLACE_TESTS, "other_errors"),
    PackageMutation(PLACE, "            check_file(file)\n", "            pass\n", PLACE_TESTS, "broken_file_is_named"),
    PackageMutation("optional.py", "    for module in EXTRAS[extra]:\n", "    for module in EXTRAS[extra][:1]:\n",
                    "test_optional.py", "names_the_module"),
]
PROGRESS, PROGRESS_TESTS = "integration/progress.py", "integration/test_progress.py"

# What a caller sees of a call that runs, and of what it returns.
SHOWN = [
    PackageMutation(PROGRESS, "                self._draw()\n        self._is_running",
                    "                pass\n        self._is_running", PROGRESS_TESTS, "call_is_busy"),
    PackageMutation(PROGRESS, "(0 if request is None else _limit(request))", "0", PROGRESS_TESTS,
                    "unfinished_requests"),
    PackageMutation(PROGRESS, "            self._first = (now, made) if made else None\n",
                    "            self._first = (now, made)\n", PROGRESS_TESTS, "speed_of_tokens"),
    PackageMutation(PROGRESS, "self._bar.leave, self._bar.n = False,", "self._bar.leave, self._bar.n = True,",
                    PROGRESS_TESTS, "leaves_no_bar"),
    PackageMutation("outputs.py", "_SHORT.repr(self.text)}\"", "self.text!r}\"", "test_outputs.py", "short_line"),
]
# Which path a call takes: asked beforehand, counted, and warned of.
WHICH_PATH = [
    PackageMutation(PATHS, "    over = is_eos.cumsum(1) > is_eos.int()\n", "    over = is_eos & False\n", PATHS_TESTS,
                    "after_the_end"),
    PackageMutation(PATHS, "        over |= is_tail & ~is_eos.any(1, keepdim=True)\n", "        pass\n", PATHS_TESTS,
                    "criterion_ends"),
    PackageMutation(PATHS, "    except Answer as found:", "    except ZeroDivisionError as found:", EXPLAIN_TESTS,
                    "peft"),
    PackageMutation(GENERATE, '        engine.calls.add("native", None, 0)\n', "        pass\n", PATHS_TESTS, "raises"),
    PackageMutation("generator.py", "                        counted.num_tokens += len(output.new_token_ids)\n", "",
                    PATHS_TESTS, "each_entry"),
    PackageMutation("process_lock.py", "        self.rlock = threading.RLock()\n        _all",
                    "        self.rlock = threading.Lock()\n        _all", PATHS_TESTS, "is_collected_while"),
    PackageMutation("engine/call_counts.py", "calls + 1, tokens + num_tokens", "1, num_tokens", PATHS_TESTS,
                    "tokens_of_each_path"),
    PackageMutation("engine/call_counts.py", "            is_first = reason.kind not in self._warned\n",
                    "            is_first = str(reason) not in self._warned\n", WARNING_TESTS, "once_a_reason"),
    PackageMutation(FALLBACK, "            engine.calls.take_warning_back(reason)\n", "            pass\n",
                    WARNING_TESTS, "as_an_error"),
    PackageMutation(FALLBACK, """re.sub(r"tensor\\(.*?(\\)|$)", "a tensor", text, flags=re.DOTALL)""", "text",
                    WARNING_TESTS, "lose_the_data"),
    PackageMutation("options/argument_warnings.py", '"torch", "accelerate"', '"accelerate"', WARNING_TESTS,
                    "line_that_called"),
    PackageMutation(LOCKSTEP, "        refusal = call if isinstance(call, Reason) else engine.lockstep_reason(",
                    "        refusal = call if isinstance(call, Reason) else (lambda *_: None)(", EXPLAIN_TESTS,
                    "inputs"),
    PackageMutation(HOOKS, '            model_kwargs[CACHE_NAME] = copy.copy(given)\n', "            pass\n",
                    EXPLAIN_TESTS, "no_mark"),
    PackageMutation(EXPLAIN, "            warnings.simplefilter(\"ignore\")\n", "            pass\n", EXPLAIN_TESTS,
                    "nothing_runs"),
    PackageMutation("integration/install.py", "            _named.add(type(model))\n", "            pass\n",
                    "integration/test_install.py", "named_once"),
]
# How `model.generate` and continuous batching reach the engine.
INTEGRATION = [
    PackageMutation(HOOKS, "        if ENGINES or _holders:\n", "        if True:\n", ENABLE_TESTS, "puts_them_back"),
    PackageMutation(HOOKS, "if any(map(_is_hook, chain_of(current))):", "if False:", ENABLE_TESTS,
                    "wraps_after_enable"),
    PackageMutation(HOOKS, "model if reason is not None else view_of(", "view_of(", ENABLE_TESTS, "itself"),
    PackageMutation("integration/view.py", "(operator.getitem, ([model_of(self)], 0))",
                    "object.__reduce_ex__(self, protocol)", ENABLE_TESTS, "processor_that_holds"),
    PackageMutation(GENERATE, "    if edits.no_repeat_ngram_size:\n", "    if False:\n", OPTIONS_TESTS,
                    "ngrams_of_the_left_padding"),
    PackageMutation(GENERATE, "if width > 1 and settings.edits.forced_bos_token_id is not None:",
                    "if False:", OPTIONS_TESTS, "forced_bos"),
    PackageMutation(GENERATE, "    sequences = [*edits.bad_words_ids, *(",
                    "    sequences = [*(", OPTIONS_TESTS, "would_match_the_padding"),
    PackageMutation(INPUTS, "(np.diff(real, axis=1) < 0).any()", "False", FALLBACK_TESTS, "masks_that_are_not_left"),
    PackageMutation(INPUTS, "not (given == expected).all()", "False", FALLBACK_TESTS,
                    "test_position_ids_of_the_caller"),
    PackageMutation(PIECES, "    return _same(given, made)\n", "    return True\n", FALLBACK_TESTS,
                    "a_length_processor_of_the_callers_own"),
    PackageMutation(PIECES, "        min(criterion.max_length for criterion in lengths)",
                    "        lengths[0].max_length", GIVEN_TESTS, "two and lengths"),
    PackageMutation(PIECES, "        made = made | {\"prompt_ignore_length\": None}\n", "        pass\n", GIVEN_TESTS,
                    "RepetitionPenalty and ragged"),
    PackageMutation("options/table.py", "is_active=lambda value: value < 1.0, draws", "draws", "options/test_table.py",
                    "switches_an_option_off"),
    PackageMutation("options/table.py", "if option.only_sampling and not config.do_sample:", "if False:",
                    "options/test_table.py", "greedy"),
    PackageMutation(GIVEN, "and not _commute(first, second)", "and False", GIVEN_TESTS, "left_to_stocks_loop"),
    PackageMutation(GIVEN, "and all(map(math.isfinite, other.sequence_bias.values()))", "", GIVEN_TESTS, "infinite"),
    PackageMutation(GIVEN, "return max(config.min_new_tokens or 0, (config.min_length or 0) - width, 0)",
                    "return config.min_new_tokens or 0", GIVEN_TESTS, "MinLength or minima"),
    PackageMutation(LATE, "range(self._width, tokens", "range(0, tokens", LATE_TESTS, "gemma2"),
    PackageMutation(LATE, "torch.cat([self._positions, self._positions[:, -1:] + steps]",
                    "torch.cat([self._positions, self._positions[:, -1:] + 0 * steps]", LATE_TESTS, "are_stocks"),
    PackageMutation(LATE, "if (reason := self._mark.difference(model)) is not None:", "if False:", LATE_TESTS,
                    "something_else_by_now"),
    PackageMutation("runner/weights.py", "if executor.state_key() != self.state_key:", "if True:", LATE_TESTS,
                    "are_stocks"),
    PackageMutation(LOCKSTEP, "if config.use_cache is False:\n", "if False:\n", "integration/test_inert_arguments.py",
                    "without_a_cache_in_lockstep"),
    PackageMutation(FALLBACK, "    if engine.config.strict:\n", "    if False:\n", FALLBACK_TESTS, "inputs_embeds"),
    PackageMutation(LOCKSTEP, "        result[CACHE_NAME] = cache.to_dynamic(model.config)\n",
                    "        pass\n", LOCKSTEP_TESTS, "the_returned_cache_is_stocks"),
    PackageMutation(CACHE, "            self._length += tokens_to_remove\n", "", LOCKSTEP_TESTS, "prompt_lookup"),
    PackageMutation(BOARD, "for key in (request_id, *children):", "for key in (request_id,):",
                    "integration/continuous_batching/test_board.py", "children"),
    PackageMutation(BOARD, "if self.open.get(request.request_id) is request]", "]",
                    "integration/continuous_batching/test_board.py", "children"),
    PackageMutation(REQUESTS_FILE, "        return [*children, self]\n", "        return [self, *children]\n",
                    "integration/continuous_batching/test_board.py", "children"),
    PackageMutation("engine/driver.py", "self._stop = max(self._stop, _NOW if now else _FLUSH)", "self._stop = _FLUSH",
                    BATCHING_TESTS, "hard_stop_fails"),
    PackageMutation(f"{BATCHING}/batched_calls.py", "_DISABLED if error is None else f\"{BROKE}{error!r}\"",
                    "_DISABLED", BATCHING_TESTS, "breaks_fails"),
    PackageMutation("integration/continuous_batching/methods.py",
                    "            manager.stop(block=block, timeout=timeout, hard_stop=True)\n",
                    "            pass\n", BATCHING_TESTS, "stops_also_where_its_block_raises"),
]

# What a fork, another tokenizer, or memory that moved must not leave behind.
STALENESS = [
    PackageMutation("engine/stop_rules.py", "return id(tokenizer), size,", "return id(tokenizer),",
                    "test_generator.py",
                    "tokens_that_are_added"),
    PackageMutation("engine/features/drafts.py", "        self._drafters.clear()\n        self._rollouts.forget()\n",
                    "        pass\n", "engine/test_speculation.py", "among_the_indexes"),
    PackageMutation("integration/continuous_batching/batched_calls.py", "            raise  # the thread fails",
                    "            return  # the", BATCHING_TESTS, "while_a_request_is_cancelled"),
    PackageMutation("engine/driver.py", "                    self._attempt(action)", "                    action()",
                    BATCHING_TESTS, "while_a_request_is_cancelled"),
    PackageMutation("process_lock.py", "            self.rlock = threading.RLock()\n", "            pass\n",
                    "test_at_fork.py", "every_lock"),
    PackageMutation("process_lock.py", "            self.condition = threading.Condition()\n", "            pass\n",
                    "test_at_fork.py", "every_lock"),
    PackageMutation("models/merged.py", ", list(map(_NBYTES, map(_STORAGE, tensors)))", "",
                    "models/test_merged.py", "has_less_memory"),
    PackageMutation("models/fused.py", "for weight in merged.weights], self._held)", "for weight in ()], self._held)",
                    "models/test_merged.py", "while_steps_may_read_it"),
    PackageMutation("models/fused.py", " and self._places == self._places_now()", "", "models/test_merged.py",
                    "leads_to and pointed_elsewhere"),
    PackageMutation("models/fused.py", "return [list(map(id, weights)), *places(weights)]", "return places(weights)",
                    "models/test_merged.py", "leads_to and over_the_old_memory"),
    PackageMutation("models/fused.py", "is_same = is_same and self._parts_merged == self._merged", "pass",
                    "models/test_merged.py", "leads_to and new_module"),
    PackageMutation("models/fused.py", "not (is_same and self._are_all_merged())", "not is_same",
                    "models/test_merged.py", "replaced_between_two_steps"),
    PackageMutation("models/fused.py", "not (is_same and self._are_all_merged())", "True",
                    "models/test_merged.py", "nothing_is_looked_up"),
    PackageMutation("models/fused.py", "is_same = self._parts_look == (look", "is_same = self._checked == (look",
                    "models/test_merged.py", "interrupted_call"),
    PackageMutation("models/keep_alive.py", "all(map(is_alias, held, tensors))",
                    "all(a.data_ptr() == b.data_ptr() for a, b in zip(held, tensors))",
                    GRAPHS_TESTS, "hold_what_they_read"),
    PackageMutation("models/keep_alive.py", "len(held) == len(tensors) and ", "", GRAPHS_TESTS, "hold_what_they_read"),
    PackageMutation("runner/graphs.py", 'attrgetter("shape"), torch.Tensor.stride', "torch.Tensor.stride",
                    GRAPHS_TESTS, "tensor_of_the_model_is_another and narrowed"),
    PackageMutation("runner/graphs.py", 'attrgetter("shape"), torch.Tensor.stride', 'attrgetter("shape")',
                    GRAPHS_TESTS, "tensor_of_the_model_is_another and transposed"),
    PackageMutation("runner/graphs.py", "watched([*parameters, *buffers,", "watched([*parameters,",
                    GRAPHS_TESTS, "tensor_of_the_model_is_another and another_buffer"),
    PackageMutation("runner/graphs.py", "*self._executor.plain_tensors(), *self", "*self",
                    GRAPHS_TESTS, "tensor_of_the_model_is_another and another_attribute"),
    PackageMutation("guards/snapshot.py", "list(map(_SHAPE, tensors)), _storage_sizes(tensors)",
                    "list(map(_SHAPE, tensors))",
                    "models/test_merged.py", "too_small_for_its_parameter"),
    PackageMutation("models/eligibility.py",
                    "    if has >= needed:\n", "    if True:\n",
                    "models/test_merged.py", "a_model_without_memory and all"),
    PackageMutation("engine/engine.py", "        self._core.dirty = not self.group.is_parallel\n", "",
                    "test_at_fork.py", "idle"),
]

# Settings of one request that must not end another's.
FAILING_TESTS, TABLE, TABLE_TESTS = (
    "engine/test_failing_requests.py", "engine/request_table.py", "engine/test_request_table.py")
REQUESTS = [
    PackageMutation(TABLE, "            self._arrivals.pop(request.request_id, None)\n", "", TABLE_TESTS, "no_part"),
    PackageMutation(TABLE, "        return self._by_id.get(request.sequence.request_id) is request",
                    "        return request.request_id in self._by_id", TABLE_TESTS, "next_one_of_its_id"),
    PackageMutation(STATE, "self.dirty, self.stepping_thread = True, threading.get_ident()\n        try:\n"
                    "            yield", "pass\n        try:\n            yield", TABLE_TESTS, "interrupted_ends"),
    PackageMutation(STATE, "            return\n        if error is not None:\n",
                    "            pass\n        if error is not None:\n", TABLE_TESTS, "again_changes"),
    PackageMutation("engine/engine.py", "self.after_step(lambda: self._carry_out(End(",
                    "(lambda do: do())(lambda: self._carry_out(End(", TABLE_TESTS, "a_tokenizer"),
    PackageMutation("engine/features/feature_set.py",
                    "            return action(*args)\n        except Exception as error:",
                    "            return action(*args)\n        except ZeroDivisionError as error:", FAILING_TESTS,
                    "hook and Streaming"),
    PackageMutation(LOOP,
                    "return request if request is not None and request.sequence is sequence else None",
                    "return request", FAILING_TESTS, "ran_ahead"),
    PackageMutation("engine/features/stop_rules.py", "            if len(group) == 1:\n", "            if True:\n",
                    "engine/test_stopping.py", "one_row_ends_that_row"),
    PackageMutation("engine/engine.py", "                    self._look_for_arrivals()\n                    if self.",
                    "                    self._has_looked = False\n                    if self.",
                    "engine/test_engine.py", "before_a_change_of_the_model"),
]

# Weights that change while requests run, requests that go on, and kinds of log-probabilities.
UPDATE_TESTS, CONTINUED_TESTS = "engine/test_weight_update.py", "options/test_continued.py"
UPDATES = [
    PackageMutation(PREPARED, "scheduler.preempt_all(but_keepers=True)", "scheduler.preempt_all()", UPDATE_TESTS,
                    "own_way"),
    PackageMutation(PREPARED, "                self._leave_old_model(self.scheduler)\n", "                pass\n",
                    UPDATE_TESTS, "own_way"),
    PackageMutation(PREPARED, "                    self._executor.refresh(None)\n", "                    pass\n",
                    UPDATE_TESTS, "copies_of"),
    PackageMutation("engine/lockstep.py", "            sequence.is_mixed = True\n", "            pass\n", UPDATE_TESTS,
                    "in_lockstep"),
    PackageMutation("runner/weights.py", "            if self._cached is not None:\n", "            if True:\n",
                    UPDATE_TESTS, "stays_while_nothing"),
    PackageMutation("engine/session.py", "output_token_ids=made,\n", "\n", CONTINUED_TESTS,
                    "preempted_and_interrupted"),
    PackageMutation("engine/features/log_probs.py", "self._numbers(step, request.logprobs_kind)",
                    "self._numbers(step, min(step.handle.logprobs))", "engine/test_log_probs.py", "kinds_meet"),
    PackageMutation("engine/stop_rules.py", "            self.push(token)\n", "            pass\n",
                    CONTINUED_TESTS,
                    "stop_strings"),
    PackageMutation("engine/engine.py", "            seed = before.seed\n", "            pass\n", CONTINUED_TESTS,
                    "cached_blocks"),
]

# Weights, own code and keys of the prefix cache.
RECOGNITION = [
    PackageMutation("runner/weights.py", "watched([*parameters, *executor.plain_tensors()])", "watched(parameters)",
                    "guards/test_plain_tensors.py", "changed_in_place"),
    PackageMutation(OWN_CODE, "        if table.holds():\n            return None\n",
                    "        return None\n", PATCHED_TESTS, "attention_of_torch"),
    PackageMutation(OWN_CODE, "        self.watch(module, name)\n        if isinstance(value, ModuleType):\n",
                    "        if isinstance(value, ModuleType):\n", PATCHED_TESTS, "every_global and qwen2"),
    PackageMutation(OWN_CODE, "all(map(_ARE_DISJOINT, self._keys, self._missing))", "True", PATCHED_TESTS,
                    "class_may_shadow and qwen2"),
    PackageMutation(OWN_CODE, "for name in (*_UNNAMED, *names):", "for name in names:", PATCHED_TESTS,
                    "how_every_class and qwen2"),
    PackageMutation(OWN_CODE, "                if hasattr(nn.Parameter, name):\n", "                if False:\n",
                    PATCHED_TESTS, "method_of_tensors and qwen2"),
    PackageMutation(OWN_CODE, '_PARTS = ("__code__", "__defaults__", "__kwdefaults__")', '_PARTS = ("__code__",)',
                    PATCHED_TESTS, "defaults_of_every and qwen2"),
    PackageMutation(OWN_CODE, "        for name in function.__kwdefaults__ or ():\n", "        for name in ():\n",
                    PATCHED_TESTS, "changed_in_place"),
    PackageMutation(OWN_CODE, "                self._owners.setdefault(value)\n", "                pass\n",
                    PATCHED_TESTS, "what_stock_keeps"),
    PackageMutation(AT_HOME, "if vars(module).get(attribute, ABSENT) is not value:", "if False:", PATCHED_TESTS,
                    "what_a_module_imports"),
    PackageMutation(AT_HOME, "not (callable(value) or hasattr(kind, \"__get__\"))", "True", PATCHED_TESTS,
                    "no_other_callable and qwen2"),
    PackageMutation("guards/global_state.py", "if type(mode) is not DeviceContext:", "if False:",
                    PATCHED_TESTS, "a_mode_of_the_users"),
    PackageMutation("guards/global_state.py", "if type(mode) is not DeviceContext:", "if True:",
                    PATCHED_TESTS, "a_default_device"),
    PackageMutation("models/eligibility.py",
                    "takewhile(lambda kind: kind is not executor.model_class, kinds)", "()", PATCHED_TESTS,
                    "helper_of_a_subclass"),
    PackageMutation("guards/capturing.py", "        _CODE is not None\n", "        False\n",
                    "guards/test_capturing.py", "auxiliary_loss"),
    PackageMutation("runner/weights.py", "    return watched([*parameters,",
                    "    return watched([t for t in parameters if type(t).__name__ != 'Int8Tensor'] + [", INNER_TESTS,
                    "dropped and data"),
    PackageMutation("guards/inner_tensors.py", "                found += inner_tensors(tensor) or [tensor]\n",
                    "                found.append(tensor)\n", INNER_TESTS, "dropped or look"),
    PackageMutation("guards/snapshot.py", " or self._wrappers != list(map(vars, wrappers))", "", INNER_TESTS,
                    "settings_changed_in_place or look"),
    PackageMutation("models/tokenwise.py", "    if kwargs is None:\n", "    if True:\n", INNER_TESTS,
                    "not_computed_alone"),
    PackageMutation("models/tokenwise.py", " and granularity.dim == -1", "", INNER_TESTS, "not_computed_alone"),
    PackageMutation("models/tokenwise.py", "(_OF_A_ROW if args.dynamic else _FIXED)", "_FIXED", TOKENWISE_TESTS,
                    "schemes"),
    PackageMutation("guards/compressed.py", " or forward.__self__ is not module", "", TOKENWISE_TESTS,
                    "another_forward"),
    PackageMutation("scheduler/sequence.py", "        key = model_key + self.cache_salt\n", "        key = model_key\n",
                    "test_cache_salt.py", "only_equal_salts"),
]

NAMES_TESTS, ADAPTER_TESTS = "integration/test_adapter_names.py", "engine/test_adapters.py"
# LoRA adapters of rows.
ADAPTERS = [
    PackageMutation(PREPARED, "keys[name] = self._executor.state_key(name)", "keys[name] = state_key",
                    ADAPTER_TESTS, "only_rows_of_the_same"),
    PackageMutation("models/base.py", "digest + hashlib.sha256(b\"adapter:\" + adapter.encode(\"utf-8\", "
                    "\"surrogatepass\")).digest()", "digest", ADAPTER_TESTS, "that_come_while"),
    PackageMutation("models/base.py", "state = look.state if adapter is None else look.adapters.get(adapter)",
                    "state = look.state", ADAPTER_TESTS, "only_rows_of_the_same"),
    PackageMutation("runner/adapter_slots.py", "            self._send(list(self._names))\n", "", ADAPTER_TESTS,
                    "when_another_adapter_comes"),
    PackageMutation("engine/features/adapters.py", "if self._counts.hold():", "if True:",
                    ADAPTER_TESTS, "does_not_stream"),
    PackageMutation(PREPARED, "            self._end_unfit(arrivals)\n", "            pass\n",
                    ADAPTER_TESTS, "gone_before_its_request"),
    PackageMutation(PADDED, "adapters = self._state.adapters.of(rows[0]) if shape.named else None", "adapters = None",
                    GRAPHS_TESTS, "name_adapters"),
    PackageMutation(PADDED, "None if adapters is None else adapters[last])", "None)", GRAPHS_TESTS, "name_adapters"),
    PackageMutation("engine/lockstep.py", "self._version, self.has_checked_adapters = None, False",
                    "self._version = None", ADAPTER_TESTS, "whose_adapter_goes"),
    PackageMutation("engine/session.py", "            adapter=old.adapter,\n", "", ADAPTER_TESTS, "over_an_interrupt"),
    PackageMutation("models/lora_rows.py", " if layer._forward_pre_hooks and is_lora(layer) and has_only_names(layer) "
                    "else layer", " if False else layer", NAMES_TESTS, "run_meanwhile"),
    PackageMutation("guards/adapter_hooks.py", "return threading.get_ident() == self._thread", "return True",
                    "test_generator_adapters.py", "several_threads"),
    PackageMutation("models/replica.py", "if not is_hook(hook) and names_in(hook) is None)", "if not is_hook(hook))",
                    "models/test_replica.py", "name_adapters"),
    PackageMutation("models/base.py", "[layer for layer in self.source.modules() if is_lora(layer)]",
                    "[layer for _, layer in look.lora_layers()]", "models/test_replica.py", "name_adapters"),
    PackageMutation("engine/engine.py", "replica.is_pinned and replica.is_stale()", "False",
                    "models/test_replica.py", "inside_of_gathered"),
    PackageMutation(LATE, "rows_under(model, self._adapters)", "rows_under(model, [])",
                    NAMES_TESTS, "cache_under_autocast"),
    PackageMutation(PREPARED, 'self._state_key = b""  # whatever', 'pass  # whatever',
                    "engine/test_weight_update.py", "version_of_their_own"),
    PackageMutation("guards/adapter_hooks.py", "any(names != found[0] for names in found)", "False", NAMES_TESTS,
                    "of_two_calls"),
    PackageMutation("integration/generate.py", "config.use_cache is not False and any(adapters)", "False", NAMES_TESTS,
                    "returns_is_the_rows_own"),
    PackageMutation("integration/adapter_rows.py", "for _ in range(max(copies))", "", "test_generator_adapters.py",
                    "tensors"),
]

# Rows of stock's decoding loop in the engine's steps.
JOINED = [
    PackageMutation(BATCH, "            core.trust_cache()\n            self._take_back()\n",
                    "            core.trust_cache()\n", BATCH_TESTS, "planned_ahead"),
    PackageMutation(BATCH, "        if num_new > 1:\n            self._take_back()\n        plan", "        plan",
                    BATCH_TESTS, "planned_ahead"),
    PackageMutation(BATCH, "        self._take_back()\n        self._places = None\n", "        self._places = None\n",
                    BATCH_TESTS, "planned_ahead"),
    PackageMutation(BATCH, "or self._is_reordered or", "or", BATCH_TESTS, "planned_ahead"),
    PackageMutation(STATE, "if (last is not None and last[0].completion is not None) or not request", "if not request",
                    "engine/test_interrupts.py", "not_given_out_again"),
    PackageMutation("engine/engine.py", "self._core.recover_if_dirty()  # which", "pass  # which",
                    "engine/test_interrupts.py", "not_given_out_again"),
    PackageMutation("engine/lockstep.py", "        self._count, self._answer = self._count + num_new, logits",
                    "        self._count += num_new\n        self._answer = logits.view_as(logits)",
                    "engine/test_interrupts.py", "get_everything_once"),
    PackageMutation(STATE, ") or not request.is_open:", "):", "engine/test_interrupts.py",
                    "half_added"),
    PackageMutation("engine/features/lockstep.py", "        if len(joining) == 1 and not self._core.requests:\n",
                    "        if False:\n",
                    GRAPHS_TESTS, "sent_while"),
    PackageMutation("runner/graphs.py", "is not None:\n            self._send(captured, padded.inputs)\n"
                    "            self._ready",
                    "is not None:\n            self._ready", GRAPHS_TESTS, "sent_while"),
    PackageMutation("engine/lockstep_throttle.py", "min(seconds, _FORGOTTEN * self._alone)", "seconds",
                    "engine/test_lockstep_throttle.py",
                    "one_slow_step"),
    PackageMutation("engine/lockstep_throttle.py", "max(0.0, self._joined - self._alone)", "0.0",
                    "engine/test_lockstep_throttle.py",
                    "half_as_long"),
    PackageMutation("runner/request_state.py", "        self.edits.grow(num_slots)\n", "",
                    "runner/test_request_state.py", "more_slots"),
    PackageMutation("runner/request_state.py", "stages = np.pad(self._stages, (0, more))", "stages = self._stages",
                    "runner/test_request_state.py", "more_slots"),
    PackageMutation(FACTS, "elif self._parameter_kinds != _parameter_kinds(namespaces):", "elif False:", FACTS_TESTS,
                    "leaves_out"),
    PackageMutation(FACTS, "if values != getter(namespace):", "if False:", FACTS_TESTS, "quick_comparison_gives"),
]

# Families, image-text models and kernels of the Hub.
MODELS = [
    PackageMutation("models/generic.py", "return logits / config.logits_scaling", "return logits", GENERIC_TESTS,
                    "logits and granite"),
    PackageMutation("models/decoder.py", "\"logits_scaling\", \"rope_parameters\",", "\"logits_scaling\",",
                    ELIGIBILITY_TESTS, "changed_constant and ministral3"),
    PackageMutation("models/eligibility.py", "if getattr(module, \"jitter_noise\", 0.0):", "if False:",
                    ELIGIBILITY_TESTS, "noise_of_a_router"),
    PackageMutation("guards/families.py", "family._replace(wrapper=wrapper, logits=\"plain\", fused=False)",
                    "family._replace(wrapper=wrapper, fused=False)", WRAPPER_TESTS, "logits"),
    PackageMutation("models/decoder.py", "            yield \"model\", self.model.model, wrapper.body\n",
                    "            yield from ()\n", WRAPPER_TESTS, "stands_around"),
    PackageMutation("guards/original_classes.py", "for name in (\"forward\", \"__call__\")]", "for name in ()]",
                    WRAPPER_TESTS, "patched_code"),
    PackageMutation(INPUTS, "type(value) is dict and not value", "True", WRAPPER_TESTS, "an_image_in_the_call"),
    PackageMutation(INPUTS, "isinstance(value, torch.Tensor) and not value.any()", "True", WRAPPER_TESTS,
                    "token_types"),
    PackageMutation("models/__init__.py", " and not runs_kernels(model, family.modeling)", "", KERNEL_TESTS,
                    "as_they_stand"),
    PackageMutation("models/base.py", "repr((self.constants(), kernels, quantization))",
                    "repr((self.constants(), quantization))", KERNEL_TESTS, "not_hit"),
    PackageMutation(KERNELS, "    if not calls_modules:\n", "    if False:\n", KERNEL_TESTS, "after_enable"),
    PackageMutation(KERNELS, "    if layer not in TOKENWISE:\n", "    if False:\n", KERNEL_TESTS, "look_at_rows"),
    PackageMutation(KERNELS, " or forward.__self__ is not module", "", KERNEL_TESTS, "no_kernel_brought"),
    PackageMutation("models/eligibility.py", "if is_kernel(name) and function is not flash_attention_forward:",
                    "if False:", KERNEL_TESTS, "attention_kernels"),
]


FIELDS_FILE, STOPS = "server/fields.py", "engine/text.py"
ANSWERS, CHOICES = "server/answers.py", "server/choices.py"
FIELDS_TESTS, STOPS_TESTS = "server/test_fields.py", "engine/test_stop_texts.py"
ANSWERS_TESTS, BATCHED_TESTS = "server/test_answers.py", "server/test_batched_answers.py"

# What the server reads out of a body, and how its answers end.
SERVER = [
    PackageMutation(FIELDS_FILE, "if not any(_is_same(value, neutral) for neutral in REFUSED[name].passes):",
                    "if False:", FIELDS_TESTS, "not_accept and presence_penalty"),
    PackageMutation(FIELDS_FILE, '            raise _refusal(name, value, f"expected one of the fields',
                    '            _refusal(name, value, f"expected one of the fields', FIELDS_TESTS, "schema_is_known"),
    PackageMutation("server/server_request.py", "config.do_sample = self.temperature != 0", "pass", FIELDS_TESTS,
                    "arrives and temperature"),
    PackageMutation(FIELDS_FILE, "token.isascii() and token.isdecimal() and str(int(token)) == token", "True",
                    FIELDS_TESTS, "dropped and chat-logit_bias"),
    PackageMutation(FIELDS_FILE, "                _PASSED[endpoint][name].check(value)\n", "                pass\n",
                    FIELDS_TESTS, "dropped and chat-stream"),
    PackageMutation("server/templates.py", "for token in tokens if token >= vocab_size)",
                    "for token in tokens if False)", FIELDS_TESTS, "dropped and stop_token_ids"),
    PackageMutation("server/templates.py", "parameters=settable | _of_processor(processor))", "parameters=None)",
                    ANSWERS_TESTS, "all_else_is_refused"),
    PackageMutation(STOPS, "        self._held = text[start:]\n        return text[:start]\n",
                    "        return text\n", STOPS_TESTS, "pieces_join"),
    PackageMutation(STOPS, "            end, start, self.met = min(found)",
                    "            end, start, self.met = max(found)", STOPS_TESTS,
                    "pieces_join"),
    PackageMutation(ANSWERS, "for index in range(self.wishes.n or 1)]", "for index in range(1)]", ANSWERS_TESTS,
                    "choices_are and continuous and whole"),
    PackageMutation(CHOICES, "if is_met or reason in (\"eos\", \"stop\"):", "if False:", STOPS_TESTS,
                    "last_token"),
    PackageMutation("engine/stop_rules.py", "        self.is_met = self._watch.is_met\n",
                    "", "engine/test_stopping.py", "text"),
    PackageMutation(f"{BATCHING}/batched_calls.py", "                stop = stop_rule(engine, settings, request)\n",
                    "                stop = None\n", BATCHED_TESTS, "runs_in_the_batch"),
]


HOST_ROWS, HOST_ROWS_TESTS = "kernels/attention/host_rows.py", "kernels/attention/test_host_rows.py"
UNTOUCHED, UNTOUCHED_TESTS = "guards/module_snapshot.py", "guards/test_module_snapshot.py"

# What a step on a CPU leaves out.
ON_A_CPU = [
    PackageMutation(HOST_ROWS, "if (np.diff(blocks) == 1).all():", "if True:", HOST_ROWS_TESTS, "in_place"),
    PackageMutation(HOST_ROWS, "if (np.diff(blocks) == 1).all():", "if False:", HOST_ROWS_TESTS, "in_place"),
    PackageMutation(HOST_ROWS, "found = self._by_window[window] = ", "found = ", HOST_ROWS_TESTS, "read_once"),
    PackageMutation(UNTOUCHED, "if root._modules is not self._root:", "if False:", UNTOUCHED_TESTS, "another and root"),
    PackageMutation(UNTOUCHED, "and self._count_hooks() == self._counts", "and True", UNTOUCHED_TESTS, "hook"),
    PackageMutation(UNTOUCHED, "and self._replaced_forwards() == self._replaced", "", UNTOUCHED_TESTS, "forward"),
    PackageMutation(UNTOUCHED, "and all(map(operator.is_, inside, self._inside))", "", UNTOUCHED_TESTS, "another"),
    PackageMutation("models/fused.py", "if not self._is_untouched() and not is_dry():", "if False:",
                    "models/test_plain_linear.py", "between_two_steps"),
    PackageMutation("runner/attention_inputs.py", "return self.backend.read_once(meta, self.spec)", "return meta",
                    "integration/test_single_row_calls.py", "laid_out_once"),
]

CHOICE, GROUPS, PROMPTS = (f"attention/{name}.py" for name in ("choose_groups", "plan_groups", "plan_prompts"))
GROUPS_TESTS, PROMPTS_TESTS = (f"attention/test_{name}.py" for name in ("plan_groups", "plan_prompts"))
PARTS, GROUPED, PREFILL = (f"kernels/attention/{name}.py" for name in ("_parts", "grouped_decode", "prefill"))
GROUPED_TESTS, PREFILL_TESTS = (f"kernels/attention/test_grouped_{name}.py" for name in ("decode", "prefill"))
SPLITS, SPLITS_TESTS = "attention/plan_decode.py", "attention/test_plan_decode.py"
PLANNER, REGISTRY = "attention/planner.py", "attention/registry.py"

HOPPER, HOPPER_TESTS = "kernels/hopper/prefill_support.py", "kernels/hopper/test_prefill.py"

SHARES, SHARES_TESTS = "attention/hopper_backend.py", "attention/test_hopper_backend.py"

# Which calls the kernel for Hopper gets, and which steps a queue of tiles.
HOPPER_CALLS = [
    PackageMutation(HOPPER, "min(group & -group, 16)", "min(group, 16)", HOPPER_TESTS, "fill_a_tile"),
    PackageMutation(HOPPER, ">= tile_tokens(q.shape[1] // num_kv_heads)", "> 0", HOPPER_TESTS, "fill_a_tile"),
    PackageMutation(SHARES, "costs[1::2, ::-1].copy()", "costs[1::2].copy()", SHARES_TESTS, "counts"),
    PackageMutation(SHARES, "[row] // tokens + row", "[row] // tokens", SHARES_TESTS, "counts"),
    PackageMutation(SHARES, "max(shares.mean(), costs.max())", "shares.mean()", SHARES_TESTS, "counts"),
    PackageMutation(SHARES, "> _UNEVEN", "> 0", SHARES_TESTS, "uneven"),
    PackageMutation("runner/attention_inputs.py", " if self.wants_queue(plan) else None", "", SHARES_TESTS,
                    "eager_step"),
    PackageMutation("runner/graphs.py", "queued = tiles is None and self._attention.wants_queue(plan)",
                    "queued = False", GRAPHS_TESTS, "one_queue"),
    PackageMutation(PADDED, " and self._attention.may_queue():", " and False:", "runner/test_padded_steps.py",
                    "what_comes"),
    PackageMutation("runner/graphs.py", "GraphRows(slice(decodes, len(slots)), size)\n",
                    "GraphRows(slice(decodes, len(slots)), decodes)\n", GRAPHS_TESTS, "in_one_graph"),
    PackageMutation("runner/graphs.py", "**self._of_slots(slots))",
                    "**self._of_slots(slots[decodes:]))", GRAPHS_TESTS, "edited_beside"),
    PackageMutation(PADDED, "torch.cat([1 + rows[1], prompts[5, :-1]])", "torch.cat([rows[1], prompts[5, :-1]])",
                    GRAPHS_TESTS, "in_one_graph"),
    PackageMutation(PADDED, "alone = self._attention.plain_plan(seq_lens[:-1], row_slots[:-1])",
                    "alone = self._attention.plain_plan(0 * seq_lens[:-1], row_slots[:-1])", GRAPHS_TESTS,
                    "plan_of_their_own"),
    PackageMutation("runner/attention_inputs.py", "alone = self._row_by_row(self.plain_plan(seq_lens[a:b],",
                    "alone = self._row_by_row(self.plain_plan(0 * seq_lens[a:b],", GRAPHS_TESTS, "plan_of_their_own"),
    PackageMutation("runner/model_runner.py", "every_token=bool(wanted.prompt))", "every_token=False)",
                    "models/test_fused.py", "what_is_read"),
    PackageMutation("models/fused.py", "rows = residual[wanted], self._adapter_rows(_at(wanted, step.adapters))",
                    "rows = residual[wanted], rows", "models/test_lora.py", "different_adapters"),
    PackageMutation("models/fused.py", "    return num_layers - 1\n", "    return num_layers\n", "models/test_fused.py",
                    "what_is_read"),
    PackageMutation("models/decoder.py", "return result if step.wanted is None else result[step.wanted]",
                    "return result", "models/test_fused.py", "computes_all"),
    PackageMutation("kernels/gluon_support.py", "tuple(f\"{tested}.\" for", "tuple(tested for", HOPPER_TESTS,
                    "elsewhere"),
    PackageMutation("device/cuda.py", " or torch.version.hip", "", "device/test_cuda.py", "nvidia"),
    PackageMutation(HOPPER, "(q.data_ptr() | 2 * q.stride(0)", "(2 * q.stride(0)", HOPPER_TESTS, "tma"),
    PackageMutation(HOPPER, " | 2 * q.stride(0)", "", HOPPER_TESTS, "tma"),
    PackageMutation(REGISTRY, "if prefill_support.why_not_on(device) is None:", "if True:", HOPPER_TESTS, "elsewhere"),
    PackageMutation("kernels/attention/types.py", "if options.scale > 0.0:", "if True:",
                    "attention/test_paged_attention.py", "negative"),
    PackageMutation(REGISTRY, "HopperBackend(measured_only=True)", "HopperBackend()", HOPPER_TESTS, "timed"),
    PackageMutation(REGISTRY, "reason = None if name == \"auto\" else", "reason = None if True else", HOPPER_TESTS,
                    "refused_by_name"),
    PackageMutation("attention/flash_attn_backend.py", "if meta.max_query_len > 1 and options.sinks is None:",
                    "if meta.max_query_len > 1:", "attention/test_flash_attn_backend.py", "no_package_carries"),
]

ONE_LAUNCH, ONE_LAUNCH_TESTS = "models/one_launch.py", "models/test_one_launch.py"
SUPPORT, SUPPORT_TESTS = "kernels/hopper/decoder_layers_support.py", "kernels/hopper/test_decoder_layers_support.py"

# All layers of a step of few rows in one launch.
AT_ONCE = [
    PackageMutation(ONE_LAUNCH, "if not may_prepare:", "if False:", ONE_LAUNCH_TESTS, "no_plan_is_made"),
    PackageMutation(ONE_LAUNCH, "if key != self._key or", "if self._key is None or", ONE_LAUNCH_TESTS,
                    "lies_elsewhere"),
    PackageMutation(ONE_LAUNCH, "or (captures and count not in self._have_run):", "or False:", ONE_LAUNCH_TESTS,
                    "nobody_waits"),
    PackageMutation(ONE_LAUNCH, "return rows in self._ready and", "return bool(self._ready) and", ONE_LAUNCH_TESTS,
                    "of_its_own"),
    PackageMutation("kernels/build/compile_process.py", 'if module == "__main__" or', "if",
                    "kernels/build/test_compile_process.py", "no_process_would_find"),
    PackageMutation("kernels/hopper/decoder_layers/shape.py", "and self.stages >= _MOST_TOGETHER", "",
                    "kernels/hopper/decoder_layers/test_layers_shape.py", "has_room"),
    PackageMutation(ONE_LAUNCH, "or count not in self._ready or", "or", ONE_LAUNCH_TESTS, "nobody_waits"),
    PackageMutation(ONE_LAUNCH, "            self._captured += support", "            support", ONE_LAUNCH_TESTS,
                    "keeps_what_that_allocated"),
    PackageMutation(ONE_LAUNCH, "support.refuse(self.device, error)\n            if captures", "if captures",
                    ONE_LAUNCH_TESTS, "not_tried_again"),
    PackageMutation(ONE_LAUNCH, "except torch.OutOfMemoryError:\n            raise\n        except Exception as error"
                    ":  # compiling", "except Exception as error:  # compiling", ONE_LAUNCH_TESTS, "out_of_memory"),
    PackageMutation(ONE_LAUNCH, "None if product.module.bias is None else _BIASES", "None", ONE_LAUNCH_TESTS,
                    "one_by_one"),
    PackageMutation(ONE_LAUNCH, "(*norms, final_norm)", "norms", ONE_LAUNCH_TESTS, "one_by_one"),
    PackageMutation("models/fused.py", "if why_not(*self._whole_decoder()) is not None:  # a", "if False:  # a",
                    ONE_LAUNCH_TESTS, "bias_that_came"),
    PackageMutation("models/fused.py", "if not (whole and self._wants_one_launch):", "if not whole:", ONE_LAUNCH_TESTS,
                    "technique_that_is_off"),
    PackageMutation("runner/model_runner.py", "== len(plan.slots) and plan.drafts is None", "== len(plan.slots)",
                    ONE_LAUNCH_TESTS, "guesses"),
    PackageMutation("runner/model_runner.py", "plan.num_decode_rows == len(plan.slots) and plan.drafts is None",
                    "plan.drafts is None", ONE_LAUNCH_TESTS, "reads_what_the_other"),
    PackageMutation("runner/graphs.py", "=shape.one_launch and self._executor.uses_one_launch(shape.rows)",
                    "=shape.one_launch",
                    GRAPHS_TESTS, "once_its_kernel_is_there"),
    PackageMutation("runner/graphs.py", "tuple(self._executor.captured_tensors()))", "())", GRAPHS_TESTS,
                    "keeps_what_a_launch_reads"),
    PackageMutation("runner/graphs.py", " and captured.kept:", ":", GRAPHS_TESTS, "attentions_plan_sent"),
    PackageMutation("runner/graphs.py", "one_launch = plan.drafts is None and", "one_launch =", GRAPHS_TESTS,
                    "no_rows_of_one_launch"),
    PackageMutation("runner/graphs.py", "if one_launch and plan.groups is None:", "if one_launch:", GRAPHS_TESTS,
                    "what_rows_share"),
    PackageMutation("runner/graphs.py", "if padded.known is not None:", "if False:", GRAPHS_TESTS, "fails_elsewhere"),
    PackageMutation(PADDED, "        self._attention.plan_nothing()\n", "", GRAPHS_TESTS, "what_rows_share"),
    PackageMutation("kernels/hopper/decoder_layers/plan.py", "w.data_ptr() - lowest", "w.data_ptr() - lines[0]",
                    "kernels/hopper/decoder_layers/test_layers_plan.py", "where_everything_lies"),
    PackageMutation("models/decoder.py", "self.autocast, size, len", "self.autocast, 1, len", "models/test_decoder.py",
                    "number_of_ranks"),
    PackageMutation("models/decoder.py", "len(decoder.layers),\n", "\n", "models/test_decoder.py", "layers_and"),
    PackageMutation("kernels/step_inputs.py", "(position + 1).to(tl.int32)", "at.to(tl.int32)",
                    "kernels/test_step_inputs.py", "see_what_lies"),
    PackageMutation(SUPPORT, "(major, minor) != (9, 0)", "major != 9", SUPPORT_TESTS, "elsewhere"),
    PackageMutation(SUPPORT, "len(set(map(_shapes, decoder.layers))) > 1 or", "", SUPPORT_TESTS, "go_together"),
    PackageMutation(SUPPORT, "rows * int(lengths.max())", "int(lengths.max())", SUPPORT_TESTS, "even_shares"),
    PackageMutation(SUPPORT, "t.stride(), t.dtype)", "t.stride(), t.dtype)[1:]", SUPPORT_TESTS, "the_key"),
    PackageMutation("kernels/build/compiling.py", "if not _lies_on_disk(key, self._name):", "if True:",
                    "kernels/build/test_compiling.py", "on_the_disk"),
]

# Prefixes that rows share.
PREFIXES = [
    PackageMutation(CHOICE, "begin, end = ends[around][kept],", "begin, end = groups.begin[kept].astype(np.int64),",
                    GROUPS_TESTS, "all_that_pays"),
    PackageMutation(GROUPS, "        behind[group] += before[group]\n", "", GROUPS_TESTS, "from_the_outermost"),
    PackageMutation(CHOICE, "    return saved > 0, saved\n", "    return saved > -np.inf, saved\n", GROUPS_TESTS,
                    "from_the_outermost"),
    PackageMutation(GROUPS, "    if parts <= most:\n", "    if True:\n", GROUPS_TESTS, "parts_run_out"),
    PackageMutation(CHOICE, "if pieces is not None:\n        groups =", "if False:\n        groups =", GROUPS_TESTS,
                    "fixed_pieces"),
    PackageMutation(GROUPS, "MIN_SAVED_SHARE * _num_read(own, choice)", "0.0", GROUPS_TESTS,
                    "saves_little"),
    PackageMutation(PARTS, "tl.min(tl.where(live, row_begin, end), 0)", "tl.max(tl.where(live, row_begin, 0), 0)",
                    GROUPED_TESTS, "several_tiles"),
    PackageMutation(PARTS, "                readable = readable & (position[None, :] >= row_begin[:, None])\n",
                    "                pass\n", GROUPED_TESTS, "several_tiles"),
    PackageMutation(GROUPED, "tl.where(part < 0, tl.maximum(sink, -3.0e38), top)\n        total = tl.where(part < 0,"
                    " 1.0, total)", "tl.maximum(sink, -3.0e38)\n        total += 1.0", GROUPED_TESTS,
                    "several_tiles"),
    PackageMutation(PLANNER, "window is None or longest <= window", "True",
                    "runner/test_attention_inputs.py", "windows"),
    PackageMutation(PARTS, "        top = tl.maximum(sink, -3.0e38)\n        total += 1.0\n",
                    "        top = tl.maximum(sink, -3.0e38)\n", GROUPED_TESTS, "several_tiles"),
    PackageMutation(PARTS, "        acc = acc * rescale[:, None] + tl.sum(values *", "        acc += tl.sum(values *",
                    GROUPED_TESTS, "fixed_pieces"),
    PackageMutation(PARTS, "tl.where((tops > float(\"-inf\"))[:, :, None], values, 0.0)", "values", GROUPED_TESTS,
                    "fixed_pieces"),
    PackageMutation(PARTS, "    if pieces == 1:\n        return\n", "", GROUPED_TESTS, "random_trees"),
    PackageMutation("kernels/attention/_launch.py", "options.scale * LOG2_E", "options.scale", GROUPED_TESTS,
                    "random_trees"),
    PackageMutation("kernels/_checks.py", "        check(*args, **kwargs)\n", "",
                    "kernels/layer/test_qk_norm_rope_store.py", "bad_arguments"),
    PackageMutation(PLANNER, "chosen[0] is not groups or", "", "runner/test_attention_inputs.py",
                    "groups_change"),
    PackageMutation("runner/graphs.py", "shape._replace(tiles=tiles)", "shape._replace(tiles=None)", GRAPHS_TESTS,
                    "share_a_prefix"),
    PackageMutation("runner/graphs.py", "                                tiles=tiles), inputs)",
                    "                                tiles=None), inputs)",
                    GRAPHS_TESTS, "cached_prefix"),
    PackageMutation(PROMPTS, "    rows[: len(plan.rows)] = plan.rows\n", "    rows[:] = plan.rows[-1]\n", PROMPTS_TESTS,
                    "ahead_of_a_row"),
    PackageMutation(PROMPTS, "start[row_of] + place + 1", "(start + num_new)[row_of]", PROMPTS_TESTS, "ahead_of_a_row"),
    PackageMutation(SHARES, " and not is_shared", "", PROMPTS_TESTS, "never_reaches"),
    PackageMutation(PROMPTS, " / max(share_of_layers, 1e-9)", "", PROMPTS_TESTS, "layers_that_see_nothing"),
    PackageMutation(PREFILL, "row_begin + (begin - row_begin) // BLOCK_N * BLOCK_N", "begin // BLOCK_N * BLOCK_N",
                    PREFILL_TESTS, "random_trees"),
    PackageMutation(PREFILL, "live & (part_top > float(\"-inf\"))[:, None]", "live", PREFILL_TESTS, "several_tiles"),
    PackageMutation(PREFILL, "total * rescale + part_total * weight", "total * rescale + part_total", PREFILL_TESTS,
                    "several_tiles"),
    PackageMutation("runner/attention_inputs.py", "self.saved_prompt_positions = saved, self.saved_positions",
                    "self.saved_prompt_positions = self.saved_positions, saved", "runner/test_attention_inputs.py",
                    "one_token_each"),
]

LORA, LORA_TESTS = "models/lora.py", "models/test_lora.py"
LORA_KERNEL_TESTS = "kernels/lora/test_lora_kernels.py"

LORA_LAYERS = [
    PackageMutation(LORA, "if not candidates or _is_patched():", "if not candidates:", LORA_TESTS,
                    "patched"),
    PackageMutation(LORA, "return layers if len(dtypes) <= 1 else {}", "return layers", LORA_TESTS, "two_dtypes"),
    PackageMutation(LORA, "if module.lora_variant or not module.cast_input_dtype_enabled:", "if False:", LORA_TESTS,
                    "no_plain_lora"),
    PackageMutation(LORA, "tuple(columns), self._autocast or dtype)", "tuple(columns), torch.bfloat16)", LORA_TESTS,
                    "log_probs"),
    PackageMutation("models/fused.py", "if self._adapters is not None and found.key == self._adapters.key:",
                    "if self._adapters is not None:", LORA_TESTS, "switched and tables"),
    PackageMutation("kernels/lora/lora_table.py", "return self.a.data_ptr(), self.b.data_ptr(), bias,", "return bias,",
                    LORA_TESTS, "moved and tables"),
    PackageMutation("kernels/lora/lora_shrink.py", "acc * scale[None, :], mask=", "acc, mask=", LORA_KERNEL_TESTS,
                    "ranks"),
    PackageMutation("kernels/lora/_lora_tile.py", "in tl.range(RANK // BLOCK_R, num_stages=1)",
                    "in tl.static_range(RANK // BLOCK_R)", LORA_KERNEL_TESTS, "any_rank"),
    PackageMutation("kernels/lora/lora_expand.py", "num_warps = 8 if", "num_warps = 4 if", LORA_KERNEL_TESTS,
                    "any_rank"),
    PackageMutation("kernels/lora/lora_shrink.py", "block_k = 32 if", "block_k = 64 if", LORA_KERNEL_TESTS, "any_rank"),
    PackageMutation("kernels/lora/_lora_tile.py", "entry = tl.load(tile_entries + tl.program_id(0))", "entry = 0",
                    LORA_KERNEL_TESTS, "rows"),
    PackageMutation("models/adapted_layers.py", "return rows.order", "return None", LORA_TESTS, "different_adapters"),
    PackageMutation("kernels/lora/lora_order.py", "tl.where(each < mine, tiles, 0)", "tl.where(each < mine, counts, 0)",
                    "kernels/lora/test_lora_order.py", "kernel"),
    PackageMutation("kernels/lora/_lora_tile.py", "sums * tl.load(scales + slot, mask=there, other=0.0)[None, :]",
                    "sums", LORA_KERNEL_TESTS, "behind_silu"),
    PackageMutation("kernels/lora/lora_qk_norm_rope_store.py", "entry = tl.where(has_adapters, entry, -1)",
                    "entry += 0", "kernels/lora/test_lora_qk_norm_rope_store.py", "between"),
    PackageMutation("models/fused.py", "product if lora is None else lora_expand_unchecked(product, *lora)", "product",
                    LORA_TESTS, "another_activation and tables"),
]

# Few rows: products that come in parts to the kernel behind them, rows that stay whole, sizes compiled ahead.
FEW_ROWS = [
    PackageMutation("kernels/layer/sum_splits_add_rms_norm.py", "total.to(dtype).to(tl.float32) + before",
                    "total + before",
                    "kernels/layer/test_sum_splits_add_rms_norm.py", "same_bits"),
    PackageMutation("models/fused.py", "product.is_plain and product.lora is None", "product.is_plain",
                    "models/test_fused.py", "in_parts"),
    PackageMutation("kernels/layer/qk_norm_rope_store.py", "return total.to(dtype)", "return total",
                    "kernels/layer/test_qk_norm_rope_store.py", "in_order_and_rounded_once"),
    PackageMutation("kernels/layer/qk_norm_rope_store.py", "if in_parts and len(qkv) == 0:", "if False:",
                    "kernels/layer/test_qk_norm_rope_store.py", "bad_arguments"),
    PackageMutation("kernels/layer/qk_norm_rope_store.py", "for part in tl.static_range(PARTS):",
                    "for part in tl.static_range(PARTS - 1):", "kernels/layer/test_qk_norm_rope_store.py",
                    "in_order_and_rounded_once"),
    PackageMutation("models/fused.py", "in_parts = self._joins and lora is None and", "in_parts = self._joins and",
                    "models/test_fused.py", "what_goes_on"),
    PackageMutation("models/fused.py", "lora is None and key.endswith(QKV_GROUP)", "lora is None",
                    "models/test_fused.py", "what_goes_on"),
    PackageMutation(SPLITS, "low if saved * cta_slots >= JOINING * sharing else longest",
                    "low", SPLITS_TESTS, "stay_whole"),
    PackageMutation(SPLITS, "sharing = lengths.sum() / longest", "sharing = 1",
                    SPLITS_TESTS, "stay_whole"),
    PackageMutation(SPLITS, "sharing = lengths.sum() / longest", "sharing = len(lengths)",
                    SPLITS_TESTS, "unlike_lengths"),
    PackageMutation(SPLITS,
                    "longest - int((-(-lengths // num_splits(lengths, low))).max())",
                    "longest - -(-longest // -(-longest // low))", SPLITS_TESTS,
                    "unlike_lengths"),
    PackageMutation(SPLITS, "saved * cta_slots >= JOINING",
                    "saved * cta_slots >= 2 * JOINING", SPLITS_TESTS, "few_rows_run"),
    PackageMutation(PADDED, "spans += (low, middle), (middle, high)", "spans += ((low, middle),)",
                    "runner/test_padded_steps.py", "far_apart"),
    PackageMutation(PADDED, "for size in self.decode_sizes if size <= most_rows", "for size in self.decode_sizes",
                    "runner/test_padded_steps.py", "far_apart_and_no_more"),
]

# Prompts: many tokens, many rows.
MANY_TOKENS = [
    PackageMutation("kernels/layer/_qk_norm_rope_many.py", "written = inside & (slot >= 0)", "written = inside",
                    "kernels/layer/test_qk_norm_rope_store.py", "many and no_token_has_a_slot"),
    PackageMutation("kernels/layer/_qk_norm_rope_many.py", "head = tile * TILE + line % SIDE", "head = tile * TILE",
                    "kernels/layer/test_qk_norm_rope_store.py", "many and norm_rotation"),
    PackageMutation("kernels/layer/qk_norm_rope_store.py", "if num_tokens >= _MANY_TOKENS:", "if False:",
                    "kernels/layer/test_qk_norm_rope_store.py", "only_many_tokens"),
    PackageMutation("kernels/layer/add_rms_norm.py", 'PREFETCH=options["PDL"] and num_rows < _MANY_ROWS',
                    'PREFETCH=options["PDL"]', "kernels/layer/test_add_rms_norm.py", "prefetched"),
]

# Calls under autocast: where values are rounded, whose precision holds, and copies that follow the weights.
AUTOCAST_TESTS = "integration/test_autocast.py"
AUTOCAST = [
    PackageMutation("kernels/layer/add_rms_norm.py", "product: tl.constexpr = dtype if weight.dtype.element_ty == "
                    "dtype else tl.float32", "product: tl.constexpr = dtype", "kernels/layer/test_add_rms_norm.py",
                    "dtypes_of_autocast and triton"),
    PackageMutation("kernels/layer/_qk_norm_rope_tile.py", "rotated: tl.constexpr = scaled if cos1.dtype == scaled "
                    "else tl.float32", "rotated: tl.constexpr = dtype", "kernels/layer/test_qk_norm_rope_store.py",
                    "dtypes_of_autocast and triton"),
    PackageMutation("kernels/layer/_qk_norm_rope_host.py", "    if both.dtype == sin.dtype:", "    if True:",
                    "kernels/layer/test_qk_norm_rope_store.py", "dtypes_of_autocast"),
    PackageMutation("kernels/cast_copies.py", "count = tl.where(tl.load(now) == tl.load(before), 0, count)",
                    "count = count + 0", "kernels/test_cast_copies.py", "nothing_is_written and interpreted"),
    PackageMutation("models/linear_groups.py", "names == self._names and all(map(operator.is_, inside, self._inside))",
                    "names == self._names", "models/test_linear_groups.py", "what_the_model_holds_now"),
    PackageMutation("kernels/cast_copies.py", " & (width >= count)", "", "kernels/test_cast_copies.py", "torchs"),
    PackageMutation("kernels/cast_copies.py", "[t.stride() for t in sources])", "[0 for t in sources])",
                    "kernels/test_cast_copies.py", "viewed_otherwise and launch"),
    PackageMutation("models/shadow.py", "self._checksum = checksum.clone()", "self._checksum = checksum",
                    "models/test_shadow.py", "writes_to_again"),
    PackageMutation("models/decoder.py", "self.autocast, cache_enabled=False)", "self.autocast)", AUTOCAST_TESTS,
                    "modules_that_run_as_they_stand"),
    PackageMutation("guards/wrapped_forward.py", "for context in reversed(contexts)", "for context in contexts",
                    "models/test_precision.py", "wrapper"),
    PackageMutation("models/base.py", "None if cast is None or self.look().dtypes == {cast} else cast", "cast",
                    "models/test_precision.py", "all_weights_are"),
    PackageMutation(PREPARED,
                    "        if self.requests or self.batches:\n            return False\n        self._executor",
                    "        self._executor", AUTOCAST_TESTS, "beside_others"),
    PackageMutation(PREPARED, "                if self._executor.has_copies:  # what",
                    "                if False:  # what",
                    AUTOCAST_TESTS, "while_others_run"),
    PackageMutation(PREPARED, "            if not self._executor.copies_are_stale():\n                return False\n",
                    "            if True:\n                return False\n", AUTOCAST_TESTS, "processor_changes"),
    PackageMutation(PREPARED, "            self._executor.refresh(self._guard.latest)\n", "            pass\n",
                    AUTOCAST_TESTS, "between_calls"),
    PackageMutation(LOCKSTEP, "        if rounds_cache:\n", "        if False:\n", AUTOCAST_TESTS, "scores_and_logits"),
    PackageMutation(GENERATE, "    autocast = engine.autocast_of_call()\n", "    autocast = None\n", AUTOCAST_TESTS,
                    "calls_in_turn"),
]

# The KV pool's memory.
POOL = [
    PackageMutation(VIRTUAL, "            self._driver.finish()\n            self._give_back()\n",
                    "            self._give_back()\n", VIRTUAL_TESTS, "memory_goes_and_comes_back"),
    PackageMutation(VIRTUAL, "        self._tidy()\n        begun", "        begun", VIRTUAL_TESTS, "cannot_be_used"),
    PackageMutation(VIRTUAL, "            except torch.OutOfMemoryError:\n                self._driver.free_cached()\n",
                    "            except torch.OutOfMemoryError:\n", VIRTUAL_TESTS, "torchs_cache"),
    PackageMutation(VIRTUAL, "piece.nbytes for piece in pieces if piece.is_ready", "piece.nbytes for piece in pieces",
                    VIRTUAL_TESTS, "cannot_be_used"),
    PackageMutation("runner/kv_cache.py", "    return -(-num_blocks * block // unit) * unit // block",
                    "    return num_blocks", POOL_TESTS, "whole_pieces"),
    PackageMutation("runner/kv_cache.py", " // unit * unit // _tensor", " // _tensor", POOL_TESTS, "whole_pieces"),
    PackageMutation("runner/graphs.py", "if self._attention.backend.knows_pool_size", "if False", POOL_TESTS,
                    "hold_the_pools_size"),
    PackageMutation("runner/model_runner.py", "            self.graphs.drop_references()\n", "            pass\n",
                    POOL_TESTS, "nothing_holds"),
    PackageMutation("runner/device.py", "for size in (self._released_blocks, FIRST_POOL_BLOCKS)",
                    "for size in (self._released_blocks,)", POOL_TESTS, "starts_small"),
    PackageMutation("models/fused.py", "        self._copied.restore()\n", "", POOL_TESTS, "copies_of_weights"),
    PackageMutation(STATE, "        self._forget_pool()\n        self.pool.release()\n",
                    "        self.pool.release()\n", POOL_TESTS, "captures_nothing"),
]

# Models that their trainer shards: who meets whom, and what stands for the model.
RENDEZVOUS, REPLICA = "parallel/rendezvous.py", "models/replica.py"
RENDEZVOUS_TESTS, REPLICA_TESTS = "parallel/test_rendezvous.py", "models/test_replica.py"
SHARDED = [
    PackageMutation(RENDEZVOUS, "end = self._skip_left() or self._come_and_wait", "end = self._come_and_wait",
                    RENDEZVOUS_TESTS, "whatever_they_missed"),
    PackageMutation(RENDEZVOUS, "            if end.startswith(_REFUSED):\n                return end\n", "",
                    RENDEZVOUS_TESTS, "come_later"),
    PackageMutation(RENDEZVOUS, "for number in range(self._kept, self._number - 1):", "for number in ():",
                    RENDEZVOUS_TESTS, "left_small"),
    PackageMutation(RENDEZVOUS, "return self._end(_ALL_CAME)", "return _ALL_CAME", RENDEZVOUS_TESTS, "all_learn"),
    PackageMutation(REPLICA, "if not is_hook(hook) and names_in(hook) is None)", "if names_in(hook) is None)",
                    REPLICA_TESTS, "model_of_before"),
    PackageMutation(REPLICA, "            whole.data = _empty(whole.shape, whole.dtype, whole.device)\n",
                    "            pass\n", REPLICA_TESTS, "goes_with_release"),
    PackageMutation(REPLICA, "return MethodType(value.__func__, mirror) if isinstance(value, MethodType)",
                    "return value if isinstance(value, MethodType)", REPLICA_TESTS, "alive"),
    PackageMutation(REPLICA, "if self._facts is not None and self._facts.hold(source):",
                    "if self._facts is not None:", REPLICA_TESTS, "changes_in_the_replica"),
    PackageMutation(FACTS, "[{key: _frozen(hook) for key, hook in hooks.items()} for hooks in _lasting_hooks(",
                    "[dict(hooks) for hooks in _lasting_hooks(", REPLICA_TESTS, "alive"),
]

# Outputs of a form.
GRAMMARS, FORMED, FORMED_TESTS = "engine/matchers.py", "integration/structured_calls.py", "engine/test_structured.py"
STRUCTURED = [
    PackageMutation("sampling/token_mask.py", "        token = first + column\n", "        token = column\n",
                    "sampling/test_token_mask.py", "kernel"),
    PackageMutation("sampling/edits.py", "        mask_tokens(scores, masks)\n", "        pass\n", FORMED_TESTS,
                    "stocks_tokens"),
    PackageMutation("runner/request_state.py", "logits.clone() if RAW in logprobs else logits", "logits", FORMED_TESTS,
                    "stocks_distribution"),
    PackageMutation("engine/features/grammars.py", "        self._match(request, step.token_list[row])\n",
                    "        pass\n",
                    FORMED_TESTS, "stocks_tokens"),
    PackageMutation("engine/features/grammars.py", "return \"stop\" if request.error is None and",
                    "return \"stop\" if False and",
                    FORMED_TESTS, "without_an_eos"),
    PackageMutation("engine/features/grammars.py", "            self._match(request, token)\n", "            pass\n",
                    FORMED_TESTS, "interrupt"),
    PackageMutation("engine/features/grammars.py",
                    "(request.matcher.accept(token) if speculative_accept is None else speculative_accept)",
                    "request.matcher.accept(token)",
                    FORMED_TESTS, "not_for_their_commit"),
    PackageMutation("engine/features/grammars.py", "                request.speculative_accept = error\n",
                    "                raise\n",
                    FORMED_TESTS, "refuses_a_token"),
    PackageMutation(PADDED, "rows, items, parts), rows.clone()", "rows, items, parts), rows", "runner/test_graphs.py",
                    "graph_of_their_own"),
    PackageMutation("runner/graphs.py", "if step.memory != (self._memory(), self.num_dropped):", "if False:",
                    "runner/test_graphs.py", "memory_may_move"),
    PackageMutation("engine/features/grammars.py", "                if request is None:\n",
                    "                if False:\n",
                    "engine/test_form_rows.py", "unless_that_is_gone"),
    PackageMutation("runner/graphs.py", "self._sent_lines = None  # an interrupt", "pass  # an interrupt",
                    GRAPHS_TESTS, "interrupt_while_lines"),
    PackageMutation("runner/graphs.py", "            lines[: step.num_rows] = masks.lines\n", "            pass\n",
                    "runner/test_graphs.py", "graph_of_their_own"),
    PackageMutation(GRAMMARS, "[token for token in eos if token in known] or list(eos) or own", "own",
                    "engine/test_grammars.py", "which_tokens_end"),
    PackageMutation(FORMED, "        if not stops or not {*stops} <= {*eos} or", "        if",
                    "integration/test_structured_calls.py", "not_certain"),
    PackageMutation(FORMED, "    if any(is_warper(p) for p in before) or", "    if",
                    "integration/test_structured_calls.py", "not_certain"),
    PackageMutation("server/forms.py", "    if names and wishes.has_tools:\n", "    if False:\n",
                    "server/test_fields.py", "go_together"),
    PackageMutation("engine/form_queue.py", "if not self._fresh or len(slow) < 2:", "if not self._fresh or not slow:",
                    "engine/test_form_queue.py", "always_goes_on"),
    PackageMutation("engine/form_queue.py", "self._fresh.pop() if self._is_last_next else ", "",
                    "engine/test_form_queue.py", "that_came_before"),
    PackageMutation("engine/form_process.py", "    os.closerange(3, file)\n", "", "engine/test_form_compilers.py",
                    "no_pipes_but"),
    PackageMutation("engine/form_process.py", "except OSError as error:  # of this job", "except EOFError as error:  #",
                    "engine/test_form_compilers.py", "cannot_be_started_for_a_form"),
    PackageMutation("engine/form_compilers.py", "before = threading.stack_size(2 * STACK_BYTES)",
                    "before = threading.stack_size(256 << 10)", "engine/test_form_compilers.py", "small_stacks"),
    PackageMutation("engine/grammars.py", '(what == "none" and not compilation.was_lost)', 'what in ("none", "lost")',
                    "engine/test_form_compilers.py", "takes_what_compiles"),
    PackageMutation("engine/grammars.py", "            if key.vocabulary not in self._vocabularies():\n"
                    "                return\n", "", "engine/test_grammars.py", "is_gone"),
    PackageMutation("engine/form_compiler.py", "(kind == _REPEAT and parts[1] > 0)", "kind == _REPEAT", FORMED_TESTS,
                    "in_some_outputs_only"),
    PackageMutation("engine/grammars.py", 'getattr(tokenizer, "eos_token_id", None), special', "None",
                    "engine/test_grammars.py", "eos_changes"),
    PackageMutation("engine/grammars.py", "if all(other.cancelled() for other in compilation.waiters):", "if True:",
                    "engine/test_form_compilers.py", "no_caller_waits"),
    PackageMutation("engine/grammars.py", "            compilation = self._open.get(key)\n",
                    "            compilation = None\n", "engine/test_form_compilers.py", "compiled_once"),
    PackageMutation(STATE, " - self._num_taken(request.sequence)", "", FORMED_TESTS, "hands_out_no_token"),
    PackageMutation("server/ending.py", "            if self.should_exit:\n", "            if False:\n",
                    "server/test_ending.py", "second_signal"),
    PackageMutation("integration/load_adapters.py", "active.get(id(layer), [])", "[name]",
                    "integration/test_load_adapters.py", "none_is_active"),
]

# What watches an engine, and calls that are awaited.
OBSERVER_TESTS, DRIVER, ASYNC_TESTS = "engine/test_observer.py", "engine/driver.py", "test_generator_async.py"
AWAITED = [
    PackageMutation(LOOP, "        self._joining.give_back(joining)\n        self._tell_of_new_start()\n",
                    "        self._joining.give_back(joining)\n", OBSERVER_TESTS, "launch_that_raises"),
    PackageMutation("engine/observer.py", "                self.remove(observer)\n", "", OBSERVER_TESTS, "is_dropped"),
    PackageMutation(DRIVER, "            self._calls.remove(call)\n            self._end_requests(call)\n",
                    "            self._calls.remove(call)\n", ASYNC_TESTS, "within_a_step"),
    PackageMutation("integration/async_calls.py", "                    call.thread.drop(call)\n",
                    "                    pass\n", ASYNC_TESTS, "takes_them"),
    PackageMutation("integration/async_calls.py",
                    "        with torch.autocast(device, dtype):\n            return function()\n",
                    "        return function()\n", ASYNC_TESTS, "autocast"),
    PackageMutation("engine/engine.py", "if one == request_id or is_copy(one, request_id)]", "if one == request_id]",
                    ASYNC_TESTS, "all_copies"),
]

OPTIONS, TOPS, ENDINGS = "engine/test_request_options.py", "sampling/top_log_probs.py", "engine/text.py"
SHARED, KEYWORDS_TESTS = "options/test_settings_reader.py", "options/test_keywords.py"

ASKED_OF_REQUESTS = [  # besides a GenerationConfig
    PackageMutation("sampling/edit_reference.py", "scores - counts * each - once", "scores - counts * (each + once)",
                    "sampling/test_edits.py", "stage_alone"),
    PackageMutation("sampling/edit_reference.py", "inside = (at >= table.prompt_length[slots][:, None]) &",
                    "inside = (at >= 0) &", OPTIONS, "those_of_the_definition"),
    PackageMutation(LOOP, "in self.features.due() if", "in () if", OPTIONS,
                    "time_is_over"),
    PackageMutation("engine/features/deadlines.py", "                deadlines.append(request.deadline)\n",
                    "                pass\n",
                    TABLE_TESTS, "times_that"),
    PackageMutation("scheduler/scheduler.py", "done and seq.max_new_tokens > 0", "done", OPTIONS, "nothing_is_drawn"),
    PackageMutation("integration/best_of.py", "0.0 if known is None else -known", "0.0 if known is None else known",
                    OPTIONS, "best_of_the_candidates"),
    PackageMutation("options/request_options.py", "timeout=_timeout(options.timeout)", "timeout=None", OPTIONS,
                    "hands_an_option"),
    PackageMutation("options/read.py", "prompt_length if reads_prompt_length(merged) else None", "None",
                    SHARED, "prompts_length"),
    PackageMutation("options/read.py", ", id(options)\n", "\n", SHARED, "options_and_lengths"),
    PackageMutation("options/read.py", "replace(settings, max_new_tokens=merged.max_new_tokens)", "settings",
                    SHARED, "options_and_lengths"),
    PackageMutation("options/read.py", " if merged.exponential_decay_length_penalty is None else merged", "",
                    SHARED, "length_penalty"),
    PackageMutation("options/settings.py", "(type(least) is not int or least > 0)", "False", SHARED, "prompts_length"),
    PackageMutation("options/keywords.py", "if name not in keywords.__annotations__:", "if False:", KEYWORDS_TESTS,
                    "unknown_keyword"),
    PackageMutation("options/keywords.py", "default=DEFAULTS.get(name), ", "", KEYWORDS_TESTS, "with_its_default"),
    PackageMutation("options/read.py", "return Merge(merged, first)", "return Merge(merged, merged)", SHARED,
                    "read_once"),
    PackageMutation("options/read.py", "all(map(_is_plain, value))", "True", "options/test_arguments.py",
                    "texts_are_alike"),
    PackageMutation("options/read.py", "copy.deepcopy(kwargs))", "kwargs)", "options/test_arguments.py",
                    "becomes_of_their_lists"),
    PackageMutation("options/arguments.py", "(map(type, prompt), int) == len(prompt)", "(map(type, prompt), int) > 0",
                    "options/test_arguments.py", "in_one_go"),
    PackageMutation(TOPS, "kept = filtered.where(rows.filtered[:, None], scaled)", "kept = scaled",
                    "sampling/test_top_log_probs.py", "without_edits"),
    PackageMutation(TOPS, "values[:, :1].float() + best[:, None]", "values[:, :1].float()",
                    "sampling/test_top_log_probs.py", "best_of_plain_rows"),
    PackageMutation("engine/features/log_probs.py", "widest = max(tops,", "widest = min(tops,",
                    "engine/test_likeliest_tokens.py", "prompts_have_theirs"),
    PackageMutation(ENDINGS, "and token_ids[-1] in self.stop_token_ids", "and not self.stop_token_ids",
                    "engine/test_endings.py", "stop_token_ends"),
    PackageMutation(ENDINGS, "self._stream.restart([])", "pass", "engine/test_endings.py", "goes_on or pieces"),
]

# Traces, pictures and the command line.
LIVES, TRACE_TESTS = "observe/request_timelines.py", "observe/test_trace.py"
CACHE_PICTURE, CACHE_PICTURE_TESTS, CHECK_TESTS = "pictures/cache.py", "pictures/test_cache.py", "cli/test_check.py"
OBSERVED = [
    PackageMutation(LIVES, "life.sequence.status is Status.WAITING:", "False:", TRACE_TESTS, "preempted_requests"),
    PackageMutation(LIVES, "                life.phase, life.since = \"queued\", at\n", "", TRACE_TESTS, "interrupt"),
    PackageMutation("observe/trace_file.py", "            if self._owner == os.getpid():  #",
                    "            if True:  #", TRACE_TESTS, "fork"),
    PackageMutation("observe/trace.py", "        engine_registry.unwatch_all(watch)\n", "", TRACE_TESTS,
                    "nobody_traces"),
    PackageMutation("engine/engine_registry.py", "        engine.watch(observer)\n", "        pass\n", TRACE_TESTS,
                    "other_engines_and_threads"),
    PackageMutation(CACHE_PICTURE, "    colors[view.users > 1] = _SHARED\n", "", CACHE_PICTURE_TESTS, "has_its_color"),
    PackageMutation("pictures/stats_html.py", "<td class=\"why\">{escape(reason)}</td>",
                    "<td class=\"why\">{reason}</td>", "pictures/test_stats_html.py", "names_are_text"),
    PackageMutation("integration/preview.py", "    model.tie_weights()  #", "    #", CHECK_TESTS, "config_alone"),
    PackageMutation("integration/trainer_callback.py", "now.calls[path].num_calls - before.calls[path].num_calls",
                    "now.calls[path].num_calls", "integration/test_trainer_callback.py", "since_the_last"),
    PackageMutation("engine/engine.py",
                    "        if not self._executor.has_source:  # the model is gone, and no call can be made\n"
                    "            return\n", "", "test_at_fork.py", "every_lock"),
]

# What decode steps read, and rows that begin with the same blocks.
READS, GROUP_TESTS = "runner/kv_reads.py", "engine/test_prefix_groups.py"
SHARED_READS = [
    PackageMutation(READS, "start if window is None else np.minimum(start, window - 1)", "start", GROUP_TESTS,
                    "window_is_counted"),
    PackageMutation(READS, "by_window.items()), by_window[None]",
                    "by_window.items()), by_window.total()", GROUP_TESTS,
                    "window_is_counted"),
    PackageMutation("runner/model_runner.py",
                    '        self._count_reads(plan)\n        device_times.end("eager", began)',
                    '        device_times.end("eager", began)', GROUP_TESTS, "bytes_that_steps"),
]

# Kernels that a step misses.
COMPILING, COMPILING_TESTS = "kernels/build/compiling.py", "kernels/build/test_compiling.py"
COMING_TESTS = "runner/test_coming.py"
REPEATED_TESTS = "runner/test_repeated_steps.py"
MISSING_KERNELS = [
    PackageMutation("runner/padded_steps.py", "slots, 1 + positions, Token", "slots, positions.add_(1), Token",
                    REPEATED_TESTS, "run_again"),
    PackageMutation("runner/model_runner.py", "        parts, ends = self.attention.parts(",
                    "        self._count_reads(plan)\n        parts, ends = self.attention.parts(", REPEATED_TESTS,
                    "run_again"),
    PackageMutation("engine/features/log_probs.py", "else request.logprobs[:count]", "else request.logprobs",
                    "engine/test_interrupts.py", "get_everything_once"),
    PackageMutation(COMPILING, "with _dry(self), suppress(Exception), _Zeros():",
                    "with _dry(self), suppress(Exception):", COMPILING_TESTS, "zeros"),
    PackageMutation(COMPILING, "if dry_run is None else partial(dry_run.launch, self, grid)", "if True else None",
                    COMPILING_TESTS, "between_a_missing"),
    PackageMutation(COMPILING, "with _told(self):\n            found = ", "if True:\n            found = ",
                    COMPILING_TESTS, "in_threads"),
    PackageMutation("models/fused.py", "if not self._is_untouched() and not is_dry():",
                    "if not self._is_untouched():", GRAPHS_TESTS, "it_to_the_real_one"),
    PackageMutation(COMPILING, "self.pool.submit(lambda: with_launcher(compile()))", "self.pool.submit(compile)",
                    COMPILING_TESTS, "what_launches"),
    PackageMutation(COMPILING, "finalize(with_launcher(compile()))", "finalize(compile())", COMPILING_TESTS,
                    "what_launches"),
    PackageMutation(COMPILING, "make = _with_globals(make, _load_module_from_path=lambda name, path: None)",
                    "pass", COMPILING_TESTS, "what_launches"),
    PackageMutation(COMPILING, "with suppress(Exception):  # the launch says", "with suppress(OSError):  #",
                    COMPILING_TESTS, "c_compiler"),
    PackageMutation("kernels/weights_checksum.py", "        compiling.with_launcher(kernel)\n", "",
                    "kernels/test_weights_checksum.py", "beforehand"),
    PackageMutation(COMPILING, "driver.active.get_current_device(), key  #", "0, key  #", COMPILING_TESTS,
                    "under_way_for_one_device"),
    PackageMutation(COMPILING, "        _thread.dry_run = None\n", "        pass\n", COMPILING_TESTS,
                    "no_thread_dry"),
    PackageMutation("kernels/weights_checksum.py", "warmup(torch.int64, torch.int64,",
                    "warmup(torch.int64, torch.int32,", "kernels/test_weights_checksum.py", "beforehand"),
    PackageMutation(PADDED, "slots, positions + 1)", "slots, (positions + 1).int())",
                    COMING_TESTS, "the_sampler"),
    PackageMutation("kernels/step_inputs.py", ', "ids", "places", "slot_mapping"', "", COMING_TESTS, "looks_tokens_up"),
]

# What Prometheus is told.
RECORDER, RECORDER_TESTS = "observe/metrics_recorder.py", "observe/test_recorder.py"
METRICS = [
    PackageMutation(RECORDER, "            self._give_up(self._tenants.index(sequence))\n", "            pass\n",
                    RECORDER_TESTS, "one_by_one"),
    PackageMutation(RECORDER, "            self._latest[slots] = now\n", "", RECORDER_TESTS, "one_by_one"),
    PackageMutation(RECORDER, "if request is not None and request.sequence is tenant and not np.isnan(time):",
                    "if request is not None and not np.isnan(time):", RECORDER_TESTS, "one_by_one"),
    PackageMutation("observe/histogram.py", "if values.size and values.min() == (most := values.max()):",
                    "if values.size and (most := values.max()):", RECORDER_TESTS, "one_value_after"),
    PackageMutation("observe/work.py", "pairs = float(start @ num_new + (num_new * (num_new + 1.0)).sum() / 2)",
                    "pairs = float(start @ num_new)", "observe/test_work.py", "products"),
    PackageMutation("observe/metric_families.py", "usable = max(stats.num_blocks - 1, 0)", "usable = stats.num_blocks",
                    "observe/test_registry.py", "waits_and_why"),
]

# Over ranks: weights by name, adapters, and SIGINT between two steps.
NAMED, NAMED_TESTS = "parallel/named_weights.py", "parallel/test_named_weights.py"
TRANSFER, TRANSFER_TESTS = "engine/weight_transfer.py", "engine/test_load_weights.py"
SIGNALS, SIGNALS_TESTS = "engine/interrupts.py", "engine/test_interrupt_signals.py"
ADAPTERS_TESTS = "parallel/test_adapters_over_ranks.py"
OVER_RANKS = [
    PackageMutation(SIGNALS, "passes, self.passes, self._since = self.passes, False, None",
                    "passes, self._since = self.passes, None", SIGNALS_TESTS, "unwinds"),
    PackageMutation(SIGNALS, "        elif self._since is None:\n", "        else:\n", SIGNALS_TESTS, "after_a_while"),
    PackageMutation(SIGNALS, "            if not is_over:\n                held.check()\n", "", SIGNALS_TESTS,
                    "swallow"),
    PackageMutation(NAMED, "self.data[offset + low - start : offset + high - start]",
                    "self.data[low - start : high - start]", NAMED_TESTS, "one_after_the_other"),
    PackageMutation(NAMED, "start - part * inner, stop - part * inner", "start, stop", NAMED_TESTS,
                    "loading_makes"),
    PackageMutation(NAMED, "part.data.narrow(part.shard.dim, offset, size)",
                    "part.data.narrow(part.shard.dim, 0, size)", NAMED_TESTS, "whole_again"),
    PackageMutation(NAMED, "    return not group.any(not same) if compare else same\n", "    return True\n",
                    NAMED_TESTS, "differ"),
    PackageMutation(TRANSFER, "        self._check_complete(set(first))\n", "", TRANSFER_TESTS,
                    "changes_nothing"),
    PackageMutation(TRANSFER, "is_known = place.covers in self._covered", "is_known = False", TRANSFER_TESTS,
                    "tied"),
    PackageMutation("parallel/adapters.py", "layer._active_adapter = before.get(id(layer), [])", "pass",
                    ADAPTERS_TESTS,
                    "every_row and process"),
    PackageMutation(NAMED, "rows.copy_(tensor.reshape(place.shard.shape)[start:stop])", "rows.zero_()",
                    "parallel/test_load_weights_over_ranks.py", "come_back_whole"),
]

# Guesses at what follows.
INDEX, GUESSES, GUESSES_TESTS = "engine/token_index.py", "engine/features/drafts.py", "engine/test_speculation.py"
INDEX_TESTS, LOOKUP_TESTS = "engine/test_token_index.py", "integration/test_prompt_lookup.py"
GUESSING = [
    PackageMutation(INDEX, "if count > common:\n", "if best is None and count > common:\n", INDEX_TESTS,
                    "longer_match"),
    PackageMutation(INDEX, "if match.text == text and tokens:\n", "if False:\n", INDEX_TESTS, "repeats_its_end"),
    PackageMutation(INDEX, "        while self._grown:\n            self._chain(self._grown.pop())\n", "", INDEX_TESTS,
                    "or_grew"),
    PackageMutation(GUESSES, "if not 0 < drafter.num_seen == sequence.num_output_tokens:", "if False:", GUESSES_TESTS,
                    "back_where_it_was"),
    PackageMutation(GUESSES, "self._is_on = self.gain >= (_GAIN_OFF if self._is_on else _GAIN_ON)", "pass",
                    GUESSES_TESTS, "come_to_nothing"),
    PackageMutation(GUESSES, "return found if gain > lost else NO_DRAFTS", "return found", GUESSES_TESTS,
                    "more_than_they_cost"),
    PackageMutation(GUESSES, "max(MOST_OF_PROMPT, len(prompt) + MOST_OF_PROMPT // 2)", "MOST_OF_PROMPT", GUESSES_TESTS,
                    "read_once"),
    PackageMutation(GUESSES, "        request.draft_tokens = request.settings.draft_tokens\n",
                    "        request.draft_tokens = request.settings.draft_tokens\n        self.started(request)\n",
                    GUESSES_TESTS, "requests_that_wait"),
    PackageMutation(GUESSES, ".digest() + salt", ".digest()", GUESSES_TESTS, "one_prompt_and_salt"),
    PackageMutation("runner/model_runner.py", "            self.state.set_tokens(slots, places, tokens[:, None])\n", "",
                    GUESSES_TESTS, "change_no_token and greedy"),
    PackageMutation(STATE, "request.sequence.output_token_ids[: request.num_emitted]",
                    "request.sequence.output_token_ids[:0]", GUESSES_TESTS, "not_streamed_again"),
    PackageMutation("runner/graphs.py", "self.drop()\n            if self.steps",
                    "self.drop()\n            self._memory_signature = signature\n            if self.steps",
                    GRAPHS_TESTS, "learn_again"),
    PackageMutation(PREPARED, "        if self.weights_in_doubt:\n", "        if False:\n", UPDATE_TESTS,
                    "wherever_the_end"),
    PackageMutation("engine/engine.py", "self._core.dirty |= batch.rows is not None", "pass", BATCH_TESTS,
                    "gives_its_blocks_back"),
    PackageMutation("engine/features/versions.py", "first_of(request.version_runs, len(made))", "[]", UPDATE_TESTS,
                    "were_streamed_stay"),
    PackageMutation("engine/features/log_probs.py", "request.logprobs[len(request.top_logprobs)]",
                    "request.logprobs[-1]", GUESSES_TESTS,
                    "change_no_token"),
    PackageMutation(GUESSES, " and request.grammar is None and settings.structured is None)", ")",
                    GUESSES_TESTS, "under_a_grammar_guess_nothing"),
    PackageMutation(LOOP, "() if step is None else features.ends(step)", "step and features.ends(step) and ()",
                    GUESSES_TESTS, "among_accepted_guesses"),
    PackageMutation("engine/features/stop_rules.py", "for key, rows in waiting.items() if len(rows) > 1\n",
                    "for key, rows in waiting.items() if False\n", GUESSES_TESTS,
                    "among_accepted_guesses"),
    PackageMutation(GENERATE, "        if request.stop is not None or request.grammar", "        if request.grammar",
                    LOOKUP_TESTS, "once_a_draft"),
    PackageMutation("integration/generate.py", "_meets_drafts(call) if len(input_ids) == 1 else None",
                    "_meets_drafts(call)", LOOKUP_TESTS, "ends_of_their_own"),
    PackageMutation("integration/stock_loop.py", "if len(input_ids) > 1 and isinstance(kwargs.get(CACHE_NAME)",
                    "if False and isinstance(kwargs.get(CACHE_NAME)", LOOKUP_TESTS, "several_rows_in_lockstep"),
    PackageMutation("integration/ranks.py", "engine.finds_shards() and num_meetings(engine.model) == before",
                    "engine.finds_shards()", "integration/test_ranks.py", "told"),
    PackageMutation(PADDED, "else _GUESSING_SIZES", "else self.decode_sizes", GRAPHS_TESTS,
                    "with_guesses"),
]

ROPE, ROPE_TESTS, REQUEST_STATE = "models/rope.py", "models/test_rope.py", "runner/request_state.py"
LONG_TESTS = "engine/test_long_requests.py"
LONG = [
    PackageMutation(ROPE, 'if one["rope_type"] == "yarn":', "if False:", ROPE_TESTS, "yarn_is_native"),
    PackageMutation(ROPE, "            limits.append(min(positions, original))\n", "            pass\n", ROPE_TESTS,
                    "left_to_stock and longrope"),
    PackageMutation(ROPE, 'elif "dynamic" in one["rope_type"]:', "elif False:", ROPE_TESTS,
                    "left_to_stock and dynamic"),
    PackageMutation("scheduler/running_table.py", "< max(limit, len(token_ids)):", "< len(token_ids):", LONG_TESTS,
                    "greedy"),
    PackageMutation(REQUEST_STATE, "<= _MOST_PADDED:", "> 0:", "runner/test_request_state.py", "of_any_lengths"),
]

HEAP, HEAP_TESTS = "engine/frozen_heap.py", "engine/test_frozen_heap.py"
FROZEN_HEAP = [
    PackageMutation(HEAP, "                gc.freeze()\n", "                pass\n", HEAP_TESTS, "call_freezes"),
    PackageMutation(HEAP, "            gc.unfreeze()\n", "            pass\n", HEAP_TESTS, "call_freezes"),
    PackageMutation(HEAP, "self.is_frozen or not gc.get_freeze_count()", "True", HEAP_TESTS, "caller_froze and before"),
    PackageMutation(HEAP, "if marker is None or any(", "if True or any(", HEAP_TESTS, "caller_froze"),
    PackageMutation(HEAP, "if marker is None or any(", "if any(", HEAP_TESTS, "behind_the_freezing"),
    PackageMutation(HEAP, "not gc.isenabled() or ", "", HEAP_TESTS, "collections_are_off"),
    PackageMutation(HEAP, "                gc.collect(1)", "                pass", HEAP_TESTS, "young_garbage"),
    PackageMutation(HEAP, " or time.monotonic() - self._last_step > _PATIENCE", "", HEAP_TESTS, "cycle_is_collected"),
    PackageMutation(HEAP, "            self._may_try = True\n", "", HEAP_TESTS, "counted_once"),
    PackageMutation("engine/engine.py", """                self._close_session(session)
            finally:
                if not self.is_reentrant():
                    self._run_deferred()""", """                self._close_session(session)
            finally:
                pass""", HEAP_TESTS, "dies or from_outside"),
    PackageMutation("engine/engine.py", """                self._deferred.pop()()
        finally:
            self._core.note_use()""", """                self._deferred.pop()()
        finally:
            pass""", HEAP_TESTS, "call_in_lockstep"),
    PackageMutation(LOOP, "        if not self._joining.may_join():\n",
                    "        self.note_use()\n        if not self._joining.may_join():\n",
                    HEAP_TESTS, "once_the_device"),
    PackageMutation(LOOP, "                self.note_use()  # a look", "                pass  # a look", HEAP_TESTS,
                    "once_the_device"),
]

FEATURES, FEATURES_TESTS = "engine/features/feature_set.py", "engine/test_features.py"
# One for each hook: the place where it is called.
FEATURE_HOOKS = [
    PackageMutation(FEATURES, "            feature.admit(request)\n", "            pass\n", FAILING_TESTS,
                    "LogProbs-take"),
    PackageMutation(FEATURES, "ends |= bool(feature.start_over(request, made))", "pass", FAILING_TESTS,
                    "Text-start_over"),
    PackageMutation(FEATURES, "self.attempt(request, feature.started, request)", "pass", FAILING_TESTS,
                    "Speculation-started"),
    PackageMutation(FEATURES, "self.attempt(request, feature.leave, request)", "pass", FAILING_TESTS,
                    "Speculation-leave"),
    PackageMutation(FEATURES, "self.attempt(request, feature.leave, request)", "feature.leave(request)", FAILING_TESTS,
                    "Speculation-leave"),
    PackageMutation(FEATURES, "in self.having[\"due\"] for request in feature.due()", "in () for request in ()",
                    OPTIONS,
                    "time_is_over"),
    PackageMutation(FEATURES, "any(feature.model_may_differ() for", "any(False for", ADAPTER_TESTS, "does_not_stream"),
    PackageMutation(FEATURES, "                feature.prepared()\n", "                pass\n", ADAPTER_TESTS,
                    "does_not_stream"),
    PackageMutation(FEATURES, "for found in feature.unfit(requests)", "for found in ()", ADAPTER_TESTS,
                    "gone_before_its_request"),
    PackageMutation(FEATURES, "if drafts := feature.drafts(num_running, device_type):", "if drafts := NO_DRAFTS:",
                    "engine/test_speculation.py", "earlier_request_made"),
    PackageMutation(FEATURES, "            wanted = feature.before(plan, wanted)\n", "            pass\n",
                    FAILING_TESTS,
                    "LogProbs-_span"),
    PackageMutation(FEATURES, "if feature.samples_late(plan)", "if False", "engine/test_structured.py",
                    "stocks_tokens"),
    PackageMutation(FEATURES, "for row in feature.ends(step, sampled)", "for row in ()", FAILING_TESTS,
                    "StopRules-_note"),
    PackageMutation(FEATURES, "self.attempt(request, feature.take, request, step, row)", "None", FAILING_TESTS,
                    "Streaming-take"),
    PackageMutation(FEATURES, "                feature.committed(step, rows)\n", "                pass\n",
                    FAILING_TESTS,
                    "LogProbs-_take_prompt"),
    PackageMutation(FEATURES, "self.attempt(request, feature.weights_changed, request, version)", "pass", UPDATE_TESTS,
                    "own_way"),
    PackageMutation(FEATURES, "                feature.lose_steps()\n", "                pass\n",
                    "engine/test_interrupts.py", "no_thread_writes"),
    PackageMutation(FEATURES, "                feature.forget()\n", "                pass\n",
                    "engine/test_speculation.py", "earlier_request_made"),
    PackageMutation("engine/features/streaming.py", "feature.stream(request, step, row, fields)", "pass", FAILING_TESTS,
                    "LogProbs-stream"),
    PackageMutation("engine/session.py", "feature.complete(self, last)", "pass", FAILING_TESTS, "LogProbs-complete"),
    PackageMutation(FEATURES, "for feature in self._all if feature.requests])", "for feature in self._all])",
                    FEATURES_TESTS, "brings_its_hooks"),
    PackageMutation(FEATURES, "for feature in self._all if feature.uses(request)])", "for feature in self._all])",
                    FEATURES_TESTS, "meets_the_features"),
    PackageMutation(FEATURES, "                self.remove(request)\n        for request in kept",
                    "                pass\n        for request in kept", FEATURES_TESTS, "holds_the_requests"),
]

PACKAGE_MUTATIONS = [
    mutation for name, some in list(globals().items()) if name.isupper() and isinstance(some, list) for mutation in some
]

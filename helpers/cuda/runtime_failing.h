// Failures: the first one is kept, faults of the processor and Ctrl-C become failures too. Included by runtime.cpp only, inside its anonymous namespace.
#pragma once

uint64_t in_library(Launch* launch, uint64_t pc) {
  Dl_info info;
  if (!pc || !dladdr((void*)launch->kernel, &info)) return 0;
  return pc - (uint64_t)info.dli_fbase;
}

Failure* first_failure(Worker* w, Fiber* f, Fault fault) {  // null when something failed before
  std::lock_guard hold(*w->failing);
  if (w->launch->failure.fault != OK) return nullptr;
  Failure& out = w->launch->failure;
  out.fault = fault;
  out.block = w->block;
  out.range = -1;
  if (f) out.thread = f->index;
  w->stop->store(true);
  return &out;
}

[[noreturn]] void abandon(Fiber* f) {  // the scheduler sees `stop` and never comes back
  f->state = FINISHED;
  to_worker(f);
  __builtin_unreachable();
}

[[noreturn]] void fail_at_line(Fiber* f, Fault fault, int line, const char* text = "", int other = 0) {
  if (Failure* out = first_failure(f->worker, f, fault)) {
    out->line = line;
    out->other_line = other;
    snprintf(out->text, sizeof out->text, "%s", text);
  }
  abandon(f);
}

[[noreturn, gnu::format(printf, 4, 5)]] void fail_at_call(Worker* w, Fiber* f, Fault fault, const char* format, ...) {
  if (Failure* out = first_failure(w, f, fault)) {
    out->line = f->line;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(out->text, sizeof out->text, format, arguments);
    va_end(arguments);
  }
  abandon(w->running);
}

[[noreturn]] void fail_at_address(Fiber* f, Fault fault, uint64_t pc, uint64_t address, size_t size, unsigned kind) {
  Launch* l = f->worker->launch;
  if (Failure* out = first_failure(f->worker, f, fault)) {
    out->pc = in_library(l, pc);
    out->address = address;
    out->size = size;
    out->kind = kind;
    uint64_t best = ~0ull;
    auto near = [&](uint64_t low, uint64_t high, int name, uint64_t most = ~0ull) {
      uint64_t far = address < low ? low - address : address >= high ? address - high : 0;
      if (low != high && far < best && far < most) best = far, out->range = name;
    };
    Worker* w = f->worker;
    near(w->dynamic_low, w->dynamic_high, DYNAMIC_SHARED, 1 << 20);
    near(w->shared_low, w->shared_high, STATIC_SHARED, 1 << 20);
    for (uint32_t i = 0; i < l->range_count; i++) near(l->ranges[i].low, l->ranges[i].high, i);
  }
  abandon(f);
}

void catch_fault(int number, siginfo_t* info, void* where);

struct Handlers {  // SIGSEGV, SIGFPE and SIGINT are ours while a kernel runs
  struct sigaction segv, bus, fpe, interrupt;
  int users = 0;
} handlers;

void catch_interrupt(int) { interrupted = true; }

void take_signals() {
  std::lock_guard hold(signal_lock);
  if (handlers.users++) return;
  struct sigaction ours {};
  ours.sa_sigaction = catch_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &ours, &handlers.segv);
  sigaction(SIGBUS, &ours, &handlers.bus);
  sigaction(SIGFPE, &ours, &handlers.fpe);
  interrupted = false;
  struct sigaction stop {};
  stop.sa_handler = catch_interrupt;
  sigaction(SIGINT, &stop, &handlers.interrupt);
}

void restore_signals() {
  std::lock_guard hold(signal_lock);
  if (--handlers.users) return;
  sigaction(SIGSEGV, &handlers.segv, nullptr);
  sigaction(SIGBUS, &handlers.bus, nullptr);
  sigaction(SIGFPE, &handlers.fpe, nullptr);
  sigaction(SIGINT, &handlers.interrupt, nullptr);
}

void catch_fault(int number, siginfo_t* info, void* where) {
  Worker* w = current_worker;
  if (number == SIGBUS && interrupted) {  // sent by cc_launch; harmless between fibers
    if (!w || !w->running) return;
    first_failure(w, w->running, INTERRUPTED);
    abandon(w->running);
  }
  if (!w || !w->running) {  // not a kernel's fault: as if we had never been here
    sigaction(number, number == SIGFPE ? &handlers.fpe : number == SIGBUS ? &handlers.bus : &handlers.segv, nullptr);
    return;
  }
  uint64_t pc = 0;
#if defined(__x86_64__)
  pc = ((ucontext_t*)where)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
  pc = ((ucontext_t*)where)->uc_mcontext.pc;
#endif
  Fiber* f = w->running;
  auto address = (uint64_t)info->si_addr;
  fail_at_address(f, number == SIGFPE ? DIVISION : SEGMENTATION, pc + 1, address, 0, READ);
}

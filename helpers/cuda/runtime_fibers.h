// Fibers: stacks and the switch between them. Included by runtime.cpp only, inside its anonymous namespace.
#pragma once

#ifdef CC_SLOW_SWITCH
void to_worker(Fiber* f) { swapcontext(&f->context, &f->worker->context); }
void to_fiber(Worker* w, Fiber* f) {
  w->running = f;
  swapcontext(&w->context, &f->context);
}
#else
extern "C" void cc_switch(void** save, void* load);
asm(R"(.text
.globl cc_switch
.hidden cc_switch
.type cc_switch,@function
cc_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cc_switch, .-cc_switch
)");
void to_worker(Fiber* f) { cc_switch(&f->stack_pointer, f->worker->stack_pointer); }
void to_fiber(Worker* w, Fiber* f) {
  w->running = f;
  cc_switch(&w->stack_pointer, f->stack_pointer);
}
#endif

void finished(Fiber* f);

void body() {
  Fiber* f = self();
  f->worker->launch->kernel(f->worker->launch->arguments);
  finished(f);
  to_worker(f);
  __builtin_unreachable();
}

void prepare(Stacks& stacks, unsigned i) {
  Fiber* f = stacks.fiber(i);
#ifdef CC_SLOW_SWITCH
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = stacks.base + i * STACK;
  f->context.uc_stack.ss_size = STACK - sizeof(Fiber) - 64;
  f->context.uc_link = nullptr;
  makecontext(&f->context, body, 0);
#else
  auto top = (uintptr_t)f & ~(uintptr_t)63;
  auto* sp = (void**)top;
  *--sp = nullptr;        // where body would return to; keeps the stack aligned as after a call
  *--sp = (void*)body;
  for (int k = 0; k < 6; k++) *--sp = nullptr;
  f->stack_pointer = sp;
#endif
}

Stacks borrow(unsigned threads) {
  {
    std::lock_guard hold(pool_lock);
    for (size_t i = 0; i < pool.size(); i++)
      if (pool[i].capacity >= threads) {
        Stacks found = pool[i];
        pool.erase(pool.begin() + i);
        return found;
      }
  }
  unsigned capacity = std::min(MOST_THREADS, (threads + 255) / 256 * 256);
  size_t size = (capacity + 1) * STACK;
  auto* raw = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return {};
  Stacks made{(char*)(((uintptr_t)raw + STACK - 1) & ~(STACK - 1)), capacity};
  for (unsigned i = 0; i < capacity; i++) mprotect(made.base + i * STACK, 4096, PROT_NONE);  // overflow is caught
  return made;
}

void give_back(Stacks stacks) {
  std::lock_guard hold(pool_lock);
  pool.push_back(stacks);
}

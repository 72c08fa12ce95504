#include "torpor/kv/drops.hpp"

#include <algorithm>

namespace torpor::kv {

Drops::Drops(const Layout& layout) : layout_(layout), groups_(layout.groups().size()) {}

void Drops::add(Page& page) {
  if (gone_.contains(&page)) return;
  if (layout_.life_cycles()[page.life_cycle].kind == LayerKind::full) {
    Node* const above = page.node->parent;
    add_tree(*page.node);
    prune(above);
    return;
  }
  add_page(page);
  prune(page.node);
}

void Drops::add_page(Page& page) {
  // One that a sequence uses stays with it, and is just not found any more.
  if (page.status != Status::droppable || !gone_.insert(&page).second) return;
  Group& group = groups_[layout_.life_cycles()[page.life_cycle].group];
  group.pages.push_back(&page);
  ++group.by_tier[static_cast<std::size_t>(page.tier)];
  ++sum_.pages;
}

void Drops::add_tree(Node& top) {
  std::vector<Node*> open{&top};
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    if (unknown_.contains(node)) continue;  // and all below it
    for (Page* page : node->pages) {
      if (page != nullptr) add_page(*page);
    }
    for (Node* child = node->first_child; child != nullptr; child = child->next_sibling) {
      open.push_back(child);
    }
    forget(*node);
  }
}

void Drops::prune(Node* node) {
  while (node->scope == nullptr && !unknown_.contains(node) && bare(*node)) {
    forget(*node);
    node = node->parent;
  }
}

bool Drops::bare(const Node& node) const {
  for (const Node* child = node.first_child; child != nullptr; child = child->next_sibling) {
    if (!unknown_.contains(child)) return false;
  }
  return std::ranges::all_of(node.pages,
                             [&](const Page* page) { return page == nullptr || gone_.contains(page); });
}

void Drops::forget(const Node& node) {
  unknown_.insert(&node);
  sum_.prefix_tokens += node.tokens.size();
}

}  // namespace torpor::kv
